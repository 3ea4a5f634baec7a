"""The workers' side: settling, sessions, leases and handlers, on a real store and with real processes."""
