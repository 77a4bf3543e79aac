"""Arrival processes."""
