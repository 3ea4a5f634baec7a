"""Pure rules: ids, canonical form, contracts, decisions. No I/O, no clock, no randomness."""
