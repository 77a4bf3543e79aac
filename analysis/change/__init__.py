"""Between runs: what gate and compare share."""
