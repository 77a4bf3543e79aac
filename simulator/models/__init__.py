"""Accelerators and models, and the engines made of them."""
