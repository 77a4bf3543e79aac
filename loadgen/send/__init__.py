"""Make requests: messages, bodies and heads, by API."""
