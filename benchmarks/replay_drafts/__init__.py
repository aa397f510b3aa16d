"""The methods that benchmarks/drafts.py compares."""
