"""A backend of another package: the cpu backend, which also writes every decode step to a file."""
