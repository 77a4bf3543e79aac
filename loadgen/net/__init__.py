"""Sockets: connections, TLS, time stamps of the kernel, proxies, and pages beside the load."""
