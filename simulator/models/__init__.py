"""Accelerators, models, and engine configurations made of them."""
