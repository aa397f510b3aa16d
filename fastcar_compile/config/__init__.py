"""What a caller configures: what to compile, and when to replay."""

from fastcar_compile.config.models import (
    Heads,
    Jacobi,
    ReplayConfig,
    SparseAttention,
    Threshold,
    parse_threshold,
)
from fastcar_compile.config.options import CompileConfig

__all__ = ["CompileConfig", "Heads", "Jacobi", "ReplayConfig", "SparseAttention", "Threshold", "parse_threshold"]
