"""The whole compiler pipeline, in order, on one screen."""

from __future__ import annotations

from fastcar_compile.config import CompileConfig
from fastcar_compile.passes.base import Pass
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.find_sites import FindSites
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.offload_mlp import OffloadMlp
from fastcar_compile.passes.quantize import QuantizeW8A8
from fastcar_compile.passes.repeat_layers import RepeatLayers

PASSES: dict[str, type[Pass]] = {
    p.name: p for p in (NormalizeState, Canonicalize, FindSites, RepeatLayers, QuantizeW8A8, InsertReplay, OffloadMlp)
}


def analysis_pipeline() -> list[Pass]:
    """Capture -> the original graph with explicit state and known sites."""
    return [
        NormalizeState(),
        Canonicalize(),
        FindSites(),
    ]


def rewrite_pipeline(config: CompileConfig, num_layers: int) -> list[Pass]:
    """The original graph -> the rewritten graph that every backend is lowered from."""
    passes: list[Pass] = []
    if config.quant == "w8a8":
        passes.append(QuantizeW8A8())
    if config.replay is not None:
        thresholds = config.replay.thresholds(num_layers)
        passes.append(InsertReplay(thresholds, config.replay.max_chain, config.replay.couple_cfg))
    return passes


def offload_pipeline() -> list[Pass]:
    """The rewritten graph -> the host graph of an accelerator."""
    return [
        OffloadMlp(),
    ]
