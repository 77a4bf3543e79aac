"""Findings as Vega-Lite charts."""
