"""Parts of benchmarks/decode.py: engines in worker processes, bytes, bandwidth, table and plot."""
