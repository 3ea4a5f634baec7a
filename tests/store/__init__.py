"""The store layer against a real server."""
