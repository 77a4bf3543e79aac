"""The OpenAI-compatible server of the simulated engine."""
