"""Mutants of the scripts: every check dropped in turn must fail a test (DESIGN section 8)."""
