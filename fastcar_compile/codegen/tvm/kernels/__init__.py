"""Scheduled TIR of the kernels that TVM does not generate, one kernel or family per file."""

HeadShape = tuple[int, int, int, int]
"""[B, heads, rows, D] of a query, [B, key/value heads, S, D] of a cache. D is the head dimension, whatever bytes the
cached row of an int8 cache has."""

OPAQUE = 8
"""Relax's kOpaque. Every kernel that reads or writes state carries it. Without it, TVM could fuse the kernel into a
neighbour. A fused in-place write goes to a temporary, and a fused read can move past the write that follows it."""
