"""The replay quality of the game decoder in examples/doom: what benchmarks/doom_quality.py does."""
