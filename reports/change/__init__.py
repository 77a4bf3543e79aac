"""Documents about several runs: a comparison, a gate."""
