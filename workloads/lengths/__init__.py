"""How many tokens a request has."""
