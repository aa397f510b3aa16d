"""The cost of quantised key and value caches: the dense NLL for every KV type."""

import numpy as np
from torch import nn

import fastcar_compile as fc
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.caches import TYPES, QuantizeKvCache
from fastcar_compile.tune.calibrate import program_of, rules_of
from fastcar_compile.tune.evaluator import Evaluator


def dense_nll(model: nn.Module, videos: np.ndarray) -> dict[str, float]:
    """Return KV type -> dense NLL in nats per token, on videos int64 [N, T]."""
    found = {}
    for dtype in ("float32", *TYPES):
        passes = [] if dtype == "float32" else [QuantizeKvCache(dtype)]
        program = run_pipeline(program_of(model, videos.shape), passes)
        layers = program.config.num_layers
        evaluator = Evaluator(program, videos, rules_of(fc.ReplayConfig(gate="never"), layers))
        found[dtype] = evaluator.measure((None,) * layers).nll
    return found
