"""Between runs: baseline, gate, comparison."""
