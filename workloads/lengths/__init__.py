"""Distributions of token counts."""
