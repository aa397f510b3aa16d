"""Fuzzers of everything that reads a file or a text from outside."""
