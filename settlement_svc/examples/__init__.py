"""Runnable handlers, bundles and the demo: what a newcomer copies from."""
