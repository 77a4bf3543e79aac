"""Processes of the product that tests start, watch and kill."""
