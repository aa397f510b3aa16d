"""What a caller configures: what to compile, and when to replay."""

from fastcar_compile.config.models import (
    CompileConfig,
    Heads,
    ReplayConfig,
    SparseAttention,
    Threshold,
    parse_threshold,
)

__all__ = ["CompileConfig", "Heads", "ReplayConfig", "SparseAttention", "Threshold", "parse_threshold"]
