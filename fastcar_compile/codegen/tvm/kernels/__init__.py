"""Scheduled TIR, one kernel per file."""

OPAQUE = 8
"""Relax's kOpaque. Kernels that read or write state carry it: fused into a neighbour, an in-place write would go to a
temporary, and a read could move past the write that follows it."""
