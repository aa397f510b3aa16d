"""Rewrites of a segment's own graph before it is imported: several operators become the one that a kernel computes."""

from fastcar_compile.codegen.tvm.fusion import operators as operators  # the steps and the converters name them
