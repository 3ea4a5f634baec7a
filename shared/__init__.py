"""What both services share: domain, store, client, command line."""
