"""Experiments in virtual time, on the simulated engine."""
