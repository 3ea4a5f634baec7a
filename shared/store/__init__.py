"""The only Redis users: keys, scripts, connection, clock, embedded server, inspection."""
