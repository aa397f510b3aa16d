"""The FastCar rewrite: score, gate, conditional MLP, caches and chain counters (docs/explanation/replay.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastcar_compile.errors import CompileError, count_text
from fastcar_compile.gates import GATES, Gate, GateWeights, gate_named
from fastcar_compile.ir.layers import Role, role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.sites import AttentionSite, attention_site
from fastcar_compile.passes.patterns.replay_layer import GateRules, ReplayInserter, ReplayLayer

Heads = tuple[tuple[tuple[int, float], ...] | None, ...]


@dataclass(frozen=True)
class InsertReplay(Pass):
    """Make every MLP with a threshold conditional, in the decode step.

    1. Matches the layers that find-sites marked. A layer whose threshold is None stays as it is.
    2. Adds the inputs `step` and `thresholds`, and per layer the state mlp_cache, chain_count and, for a gate that
       compares the MLP's input, gate_cache.
    3. Inserts score, gate and `cond(replay.all(), replay_branch, compute_branch)` in front of the closing add.
       The compute branch holds the norm and the MLP; a gate that reads the MLP's input leaves the norm outside.
    4. Returns `decisions` and `scores` of all layers after the logits, and the new state.

    Options:
        thresholds: one per layer; None: this layer never replays and gets no cache.
        max_chain: replays in a row after which a row computes; None: unlimited.
        couple_cfg: rows b and b + B / 2 replay only together.
        gate: name of the gate.
        refresh_every: every row computes in frames that are a multiple of this; None: no such frame.
        heads: per layer (query head, weight) pairs, for a gate that averages over heads; None, or (): all alike.
        gate_weights: of a gate that was trained. As text they are their digest, and a pass from text needs them again.
    """

    name: ClassVar[str] = "insert-replay"
    reason: ClassVar[str] = (
        "The MLP runs where the gate does not replay; else the output of one frame earlier is taken."
    )
    thresholds: tuple[float | None, ...] = ()
    max_chain: int | None = None
    couple_cfg: bool = False
    gate: str = "tas"
    refresh_every: int | None = None
    heads: Heads = ()
    gate_weights: GateWeights | None = None

    def gate_of(self, layer: int) -> Gate:
        """Return the layer's gate."""
        weights = None if self.gate_weights is None else self.gate_weights.layer(layer)
        return gate_named(self.gate, self.heads[layer] if self.heads else None, weights)

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError when the options do not fit the program, or when replay is there already."""
        # All layers are read first: an insertion moves the nodes of its MLP into a branch.
        layers = role_nodes(program.graph_module)
        self._check(program, [attention_site(nodes[Role.ATTENTION]) for nodes in layers.values()])
        rules = GateRules(self.max_chain, self.couple_cfg, self.refresh_every)
        writer = ReplayInserter(program, rules, self.name)
        for layer, threshold in enumerate(self.thresholds):
            if threshold is not None:
                writer.insert(ReplayLayer(layer, threshold, self.gate_of(layer), layers[layer]))
        writer.finish()
        return True

    def _check(self, program: DecoderProgram, attentions: list[AttentionSite]) -> None:
        if "decisions" in program.outputs:
            raise CompileError("insert-replay ran already", hint="name it once in the pipeline")
        layers = count_text(len(attentions), "layer")
        if len(self.thresholds) != len(attentions):
            raise CompileError(f"{count_text(len(self.thresholds), 'threshold')} for {layers}")
        if self.heads and len(self.heads) != len(attentions):
            raise CompileError(f"heads of {count_text(len(self.heads), 'layer')} for {layers}")
        for layer, (attention, heads) in enumerate(zip(attentions, self.heads, strict=False)):
            if wrong := [head for head, _ in heads or () if not 0 <= head < attention.num_heads]:
                hint = f"query heads are 0 .. {attention.num_heads - 1}"
                what = f"layer {layer} has no query head {wrong[0]}"
                raise CompileError(what, where=program.sites[layer].module_path, hint=hint)
        self._check_weights(program)
        if self.couple_cfg and program.config.batch_size % 2:
            raise CompileError(
                f"couple_cfg pairs row b with row b + B / 2, but batch_size is {program.config.batch_size}",
                hint="use an even batch_size, or couple_cfg=False",
            )

    def _check_weights(self, program: DecoderProgram) -> None:
        if self.gate_weights is not None:
            self.gate_weights.check([program.config.hidden_size] * program.config.num_layers)
        elif self.gate in GATES and GATES[self.gate].takes_weights:
            hint = "give gate_weights=GateWeights.load(file)"
            raise CompileError(f"gate {self.gate!r} needs its weights", where="insert-replay", hint=hint)
