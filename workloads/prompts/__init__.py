"""Prompt texts, and the prefixes that prompts share."""
