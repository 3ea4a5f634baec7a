"""Contract bundles that the examples, the demo and the tests register."""
