"""Parts of benchmarks/quality.py."""
