"""Sends a schedule to an endpoint in open (or closed) loop and notes when every token arrived."""
