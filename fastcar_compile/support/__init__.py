"""Checks of what the operating system or a caller may do wrong, and small helpers that every entry needs."""
