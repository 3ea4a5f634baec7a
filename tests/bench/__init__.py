"""Side-by-side measurements: ratios of alternating runs, as absolute times of shared machines mean little."""
