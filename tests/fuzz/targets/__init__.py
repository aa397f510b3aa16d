"""One module per fuzzer of Python code. `run(data)` returns whether a reader accepted the input.

It raises what the reader must not raise. A module imports the readers that it drives and little else: the engine
instruments what the import loads.
"""
