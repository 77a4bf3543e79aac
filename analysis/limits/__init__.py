"""Find what limits an endpoint: the rules of diagnosis over a summary."""
