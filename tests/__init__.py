"""Tests, bench and mutation runs: each against a private real server."""
