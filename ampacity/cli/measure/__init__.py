"""Commands that send load."""
