"""The DRS control table of a program, and what the manifest says of the controller that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.sections.accelerator import ControllerPart, LimitsPart
from fastcar_compile.codegen.hls.controller_project import limits_of
from fastcar_compile.codegen.hls.design.controller import ControllerSpec, controller_cycles, controller_usage
from fastcar_compile.config import CompileConfig
from fastcar_compile.drs.scores import pack_network
from fastcar_compile.drs.table import VERSION, AttentionShape, DrsTable, GateKind, Limits, build_table
from fastcar_compile.errors import CompileError
from fastcar_compile.gates import LayerWeights, decided_on_accelerator
from fastcar_compile.gates.weights import PARAMETERS, weights_in
from fastcar_compile.ir.program import DecoderProgram


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
        raise CompileError(
            f"the layers have different attention shapes: {'; '.join(f'layer {n}: {s}' for s, n in shapes.items())}",
            hint="compile for a CPU target; the TAS unit has one shape for all layers",
        )
    return next(iter(shapes))


def gate_kind(program: DecoderProgram, config: CompileConfig) -> GateKind:
    """Return the score that the controller is built for: that of the layers which it decides, else TAS."""
    replay = config.replay
    gated = [s.replay for s in program.sites if s.replay is not None]
    own = [r for r in gated if replay and decided_on_accelerator(r.gate, r.heads, replay.refresh_every)]
    return GateKind[own[0].gate.upper()] if own else GateKind.TAS


def operands_of(program: DecoderProgram, config: CompileConfig) -> AttentionShape:
    """Return what the controller reads of a row: q and key, or x and the cached x as one head of their width.

    Raises:
        CompileError: the layers have different attention shapes.
    """
    if gate_kind(program, config).at_most:
        return AttentionShape(1, 1, program.sites[0].mlp.hidden)
    return attention_of(program)


def networks_of(program: DecoderProgram, config: CompileConfig) -> Mapping[int, LayerWeights]:
    """Return the networks that the controller reads, by layer; empty for other gates than `learned`."""
    if gate_kind(program, config) is not GateKind.LEARNED:
        return {}
    weights = weights_in(program.params, len(program.sites))
    return {} if weights is None else weights.layers


def network_stream(weights: LayerWeights) -> NDArray[np.uint8]:
    """Return a layer's network as the controller reads it."""
    w1, b1, w2, b2 = (weights.params()[name].float().numpy() for name in PARAMETERS)
    return pack_network(w1, b1, w2, b2).view(np.uint8).reshape(-1)


def most_units(program: DecoderProgram, config: CompileConfig) -> int:
    """Return the hidden units of the largest network that the controller reads; 0: its gate has none."""
    return max((len(weights.b1) for weights in networks_of(program, config).values()), default=0)


def controller_spec(program: DecoderProgram, config: CompileConfig) -> ControllerSpec:
    """Return what the controller has to be built for.

    Raises:
        CompileError: the layers have different attention shapes.
    """
    return ControllerSpec(operands_of(program, config), gate_kind(program, config), most_units(program, config))


def control_table(program: DecoderProgram, config: CompileConfig, cores: int, prefetch_bytes: int = 0) -> DrsTable:
    """Return the DRS control table of a program; a layer whose gate the host decides has no gate in it.

    A gate whose small scores replay has minus its thresholds there.

    Args:
        prefetch_bytes: of the kernel's prefetch buffer; all layers have one stream size, so it is that of every layer.

    Raises:
        CompileError: the layers have different attention shapes.
        UserError: a size is out of the table's range.
    """
    sites, replay = program.sites, config.replay
    refresh = replay.refresh_every if replay else None
    own = [s.replay is not None and decided_on_accelerator(s.replay.gate, s.replay.heads, refresh) for s in sites]
    kind = gate_kind(program, config)
    sign = -1.0 if kind.at_most else 1.0
    return build_table(
        *(len(sites), config.batch_size, cores, config.tokens_per_frame),
        [
            sign * s.threshold if unit and s.threshold is not None else float("inf")
            for s, unit in zip(sites, own, strict=True)
        ],
        attention=operands_of(program, config),
        scales=[s.attention.scale if unit else None for s, unit in zip(sites, own, strict=True)],
        gate=kind,
        units=most_units(program, config),
        max_chain=replay.max_chain if replay else None,
        couple_cfg=replay.couple_cfg if replay else False,
        prefetch=[prefetch_bytes] * len(sites),
    )


def controller_part(table: DrsTable) -> ControllerPart:
    """Return what the manifest and the report say of the controller and its table."""
    limits = limits_of(table)
    return ControllerPart(
        table_version=VERSION,
        gate=table.gate.name.lower(),
        gated_layers=tuple(layer for layer, factor in enumerate(table.factors) if factor != 0),
        couple_cfg=table.couple_cfg,
        max_chain=table.max_chain,
        prefetch_bytes=max(table.prefetch),
        limits=_limits_part(limits, table),
        usage_estimate=controller_usage(limits).part,
        cycles_estimate=controller_cycles(table),
    )


def _limits_part(limits: Limits, table: DrsTable) -> LimitsPart:
    sizes = {name: size for name, size in asdict(limits).items() if name != "gate"}
    return LimitsPart(**sizes, gate=table.gate.name.lower())
