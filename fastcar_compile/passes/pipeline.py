"""The whole compiler pipeline, in order, on one screen."""

from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.passes.caches import QuantizeKvCache, SparsifyAttention, WindowCaches
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.decode_rows import DecodeRows
from fastcar_compile.passes.exact_arithmetic import ExactArithmetic
from fastcar_compile.passes.find_sites import FindSites
from fastcar_compile.passes.fuse_activations import FuseActivations
from fastcar_compile.passes.insert_drafts import InsertDrafts
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.legalize_norms import LegalizeNorms
from fastcar_compile.passes.linears import LegalizeLinears, SplitGateUp, UnfoldRows
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.offload import OffloadGate, OffloadLinears, OffloadMlp
from fastcar_compile.passes.parallel_blocks import ParallelBlocks
from fastcar_compile.passes.quantize import (
    Bfloat16Embedding,
    Bfloat16Weights,
    Float16Weights,
    QuantizeW4A8,
    QuantizeW8A8,
)
from fastcar_compile.passes.repeat_layers import RepeatLayers
from fastcar_compile.passes.skip_rows import SkipRows

QUANTIZE: dict[str, Pass] = {
    "bf16": Bfloat16Weights(),
    "fp16": Float16Weights(),
    "w8a8": QuantizeW8A8(),
    "w4a8": QuantizeW4A8(),
}


def analysis_pipeline() -> list[Pass]:
    """Return the passes from a capture to the original graph with explicit state and known layers."""
    return [
        # Every later pass may assume that no node writes in place, so that an alias is a second name and nothing more.
        NormalizeState(),
        Canonicalize(),
        LegalizeNorms(),
        # From here on every product with a parameter is a linear: the next passes match linears.
        LegalizeLinears(),
        UnfoldRows(),
        # split-gate-up and find-sites look for one activation node.
        FuseActivations(),
        SplitGateUp(),
        # find-sites, which comes next, knows one form of a layer.
        ParallelBlocks(),
        FindSites(),
    ]


PASSES: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        *(type(p) for p in analysis_pipeline()),
        *(RepeatLayers, Bfloat16Weights, Float16Weights, QuantizeW8A8, QuantizeW4A8, Bfloat16Embedding),
        *(InsertReplay, InsertDrafts, SkipRows),
        *(
            SparsifyAttention,
            WindowCaches,
            QuantizeKvCache,
            ExactArithmetic,
            DecodeRows,
            OffloadGate,
            OffloadMlp,
            OffloadLinears,
        ),
    )
}


def rewrite_pipeline(config: CompileConfig, num_layers: int) -> list[Pass]:
    """Return the passes from the original graph to the rewritten graph that every backend is lowered from."""
    passes: list[Pass] = []
    if config.quant in QUANTIZE:
        # Quantisation comes before replay, which moves MLPs into branches. It gives a head that is tied to the
        # embedding a weight of its own, so that the table is then read by lookups alone.
        passes += [QUANTIZE[config.quant], Bfloat16Embedding()]
    if config.replay is not None:
        passes.append(_replay(config.replay, num_layers))
        if config.replay.draft is not None:
            passes.append(InsertDrafts(config.replay.draft))
        passes.append(SkipRows(config.replay.couple_cfg))
    if config.sparse_attention is not None:
        sparse = config.sparse_attention
        passes.append(SparsifyAttention(sparse.sinks, sparse.window, sparse.positions, config.rows or 1))
    # Rings come behind replay: a score that reads the key of one frame earlier makes its ring longer.
    passes.append(WindowCaches(config.rows or 1))
    if config.kv != "float32":
        passes.append(QuantizeKvCache(config.kv))
    # It judges every operator that is left.
    if config.numerics == "exact":
        passes.append(ExactArithmetic())
    # Last: the other passes see one position, which stands for that of every row.
    if config.rows is not None:
        passes.append(DecodeRows(config.rows))
    return passes


def _replay(replay: ReplayConfig, num_layers: int) -> InsertReplay:
    return InsertReplay(
        replay.thresholds(num_layers),
        replay.max_chain,
        replay.couple_cfg,
        gate=replay.gate,
        refresh_every=replay.refresh_every,
        heads=replay.heads_of(num_layers),
        gate_weights=replay.gate_weights,
        rotary=replay.rotary,
    )


def offload_pipeline(offload: str = "mlp") -> list[Pass]:
    """Return the passes from the rewritten graph to the host graph of an accelerator; `offload` as in CompileConfig."""
    passes: list[Pass] = [OffloadGate(), OffloadMlp()]
    if offload == "linears":
        passes.append(OffloadLinears())
    return passes
