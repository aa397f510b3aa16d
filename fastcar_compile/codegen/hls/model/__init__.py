"""The hardware model: how fast a decoder would run on a board, what bounds it, and what it costs. Predictions only."""

from fastcar_compile.codegen.hls.model.shapes import DecoderShape, available_shapes, load_shape
from fastcar_compile.codegen.hls.model.system import Estimate, Workload, default_offload, estimate

__all__ = ["DecoderShape", "Estimate", "Workload", "available_shapes", "default_offload", "estimate", "load_shape"]
