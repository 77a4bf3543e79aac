"""Findings as text and tables."""
