"""What a caller configures: what to compile, and when to replay."""

from fastcar_compile.config.models import CompileConfig, Heads, ReplayConfig, SparseAttention, Threshold
from fastcar_compile.errors import describe_validation

__all__ = ["CompileConfig", "Heads", "ReplayConfig", "SparseAttention", "Threshold", "describe_validation"]
