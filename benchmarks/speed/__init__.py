"""Milliseconds per decoded token beside peers: engines in worker processes, bytes, bandwidth, table and plot."""
