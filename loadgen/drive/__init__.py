"""Drive a stage: when each request is due, and what waits for whose answer."""
