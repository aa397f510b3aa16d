"""The DRS control table of a program, and what the manifest says of the controller that reads it."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.accelerator_section import ControllerPart, LimitsPart
from fastcar_compile.codegen.hls.control_table.builder import GateScore, build_table
from fastcar_compile.codegen.hls.control_table.table import VERSION, AttentionShape, DrsTable, pack_network
from fastcar_compile.codegen.hls.design.controller import controller_cycles, controller_usage
from fastcar_compile.config import CompileConfig
from fastcar_compile.errors import CompileError
from fastcar_compile.gates import LayerWeights, decided_on_accelerator
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.weights import PARAMETERS, weights_in
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.types import LayerSite


def attention_of(program: DecoderProgram) -> AttentionShape:
    """Return the heads that the TAS unit is built for.

    Raises:
        CompileError: the layers have different attention shapes.
    """
    shapes: dict[AttentionShape, int] = {}
    for site in program.sites:
        own = site.attention
        shapes.setdefault(AttentionShape(own.num_heads, own.num_kv_heads, own.head_dim), site.layer)
    if len(shapes) > 1:
        what = f"the layers have different attention shapes: {'; '.join(f'layer {n}: {s}' for s, n in shapes.items())}"
        raise CompileError(what, hint="compile for a CPU target; the TAS unit has one shape for all layers")
    return next(iter(shapes))


def decided_sites(program: DecoderProgram) -> list[LayerSite]:
    """Return the layers whose gate the controller decides."""
    return [s for s in program.sites if s.replay is not None and decided_on_accelerator(s.replay.gate)]


def gate_kind(program: DecoderProgram) -> GateKind:
    """Return the score that the controller is built for: that of the layers which it decides, else TAS."""
    gates = [site.replay.gate for site in decided_sites(program) if site.replay is not None]
    return GateKind[gates[0].upper()] if gates else GateKind.TAS


def gate_score(program: DecoderProgram) -> GateScore:
    """Return the score with the sizes of what it reads besides q and the key."""
    kind, sites = gate_kind(program), decided_sites(program)
    heads = tuple(None if s.replay is None else s.replay.heads for s in program.sites)
    units = max((len(weights.b1) for weights in networks_of(program).values()), default=0)
    return GateScore.of(kind, program.sites[0].mlp.hidden, units, heads if sites and kind is GateKind.TAS else None)


def heads_of(program: DecoderProgram) -> AttentionShape:
    """Return the heads of q and k that the controller reads; one head of one element where it reads neither.

    Raises:
        CompileError: the layers have different attention shapes.
    """
    return attention_of(program) if gate_kind(program).reads_query else AttentionShape(1, 1, 1)


def networks_of(program: DecoderProgram) -> Mapping[int, LayerWeights]:
    """Return the networks that the controller reads, by layer; empty for other gates than `learned`."""
    if gate_kind(program) is not GateKind.LEARNED:
        return {}
    weights = weights_in(program.params, len(program.sites))
    return {} if weights is None else weights.layers


def network_stream(weights: LayerWeights) -> NDArray[np.float32]:
    """Return a layer's network as the controller reads it, float32 words."""
    w1, b1, w2, b2 = (weights.params()[name].float().numpy() for name in PARAMETERS)
    return pack_network(w1, b1, w2, b2).reshape(-1)


def network_streams(program: DecoderProgram) -> NDArray[np.float32]:
    """Return the networks of all layers, one after another; nothing for other gates than `learned`."""
    networks = networks_of(program)
    return np.concatenate([np.zeros(0, np.float32), *(network_stream(networks[layer]) for layer in sorted(networks))])


def control_table(program: DecoderProgram, config: CompileConfig, cores: int) -> DrsTable:
    """Return the DRS control table of a program; a layer whose gate the host decides has no gate in it.

    A gate whose small scores replay has minus its thresholds there.

    Raises:
        CompileError: the layers have different attention shapes.
        UserError: a size is out of the table's range.
    """
    sites, replay, score = program.sites, config.replay, gate_score(program)
    own = {site.layer for site in decided_sites(program)}
    # The controller compares in one direction alone: it replays where a score is at least the threshold.
    sign = -1.0 if score.kind.at_most else 1.0
    return build_table(
        *(len(sites), program.config.decode_rows, cores, config.tokens_per_frame),
        [sign * s.threshold if s.layer in own and s.threshold is not None else float("inf") for s in sites],
        attention=heads_of(program),
        scales=[s.attention.scale if s.layer in own else None for s in sites],
        gate=score,
        max_chain=replay.max_chain if replay else None,
        couple_cfg=replay.couple_cfg if replay else False,
        refresh_every=replay.refresh_every if replay else None,
    )


def controller_part(table: DrsTable) -> ControllerPart:
    """Return what the manifest and the report say of the controller and its table."""
    limits = table.limits
    sizes = {name: size for name, size in vars(limits).items() if name not in ("gate", "instructions")}
    return ControllerPart(
        table_version=VERSION,
        gate=table.gate.name.lower(),
        gated_layers=table.gated,
        couple_cfg=table.couple_cfg,
        max_chain=table.max_chain,
        refresh_period=table.refresh_period or None,
        limits=LimitsPart(**sizes, gate=table.gate.name.lower()),
        usage_estimate=controller_usage(limits),
        cycles_estimate=controller_cycles(table),
    )
