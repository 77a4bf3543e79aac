"""Servers that tests send load to, and their certificates."""
