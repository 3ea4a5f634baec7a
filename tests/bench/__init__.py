"""Side-by-side measurements: ratios of alternating runs in one go, because absolute times of a shared machine mean little."""
