"""The text of prompts, and what prompts share."""
