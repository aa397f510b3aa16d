"""The DRS control table of a program, and what the manifest says of the controller that reads it."""

from __future__ import annotations

from dataclasses import asdict

from fastcar_compile.artifact.sections.accelerator import ControllerPart, LimitsPart
from fastcar_compile.codegen.hls.controller_project import limits_of
from fastcar_compile.codegen.hls.design.controller import controller_cycles, controller_usage
from fastcar_compile.config import CompileConfig
from fastcar_compile.drs.table import VERSION, AttentionShape, DrsTable, build_table
from fastcar_compile.errors import CompileError
from fastcar_compile.gates import decided_on_accelerator
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


def control_table(program: DecoderProgram, config: CompileConfig, cores: int, prefetch_bytes: int = 0) -> DrsTable:
    """Return the DRS control table of a program; a layer whose gate the host decides has no gate in it.

    Args:
        prefetch_bytes: of the kernel's prefetch buffer; all layers have one stream size, so it is that of every layer.

    Raises:
        CompileError: the layers have different attention shapes.
        UserError: a size is out of the table's range.
    """
    sites, replay = program.sites, config.replay
    refresh = replay.refresh_every if replay else None
    own = [s.replay is not None and decided_on_accelerator(s.replay.gate, s.replay.heads, refresh) for s in sites]
    return build_table(
        *(len(sites), config.batch_size, cores, config.tokens_per_frame),
        [s.threshold if unit and s.threshold is not None else float("inf") for s, unit in zip(sites, own, strict=True)],
        attention=attention_of(program),
        scales=[s.attention.scale if unit else None for s, unit in zip(sites, own, strict=True)],
        max_chain=replay.max_chain if replay else None,
        couple_cfg=replay.couple_cfg if replay else False,
        prefetch=[prefetch_bytes] * len(sites),
    )


def controller_part(table: DrsTable) -> ControllerPart:
    """Return what the manifest and the report say of the controller and its table."""
    limits = limits_of(table)
    return ControllerPart(
        table_version=VERSION,
        gate="tas",
        gated_layers=tuple(layer for layer, factor in enumerate(table.factors) if factor != 0),
        couple_cfg=table.couple_cfg,
        max_chain=table.max_chain,
        prefetch_bytes=max(table.prefetch),
        limits=LimitsPart(**asdict(limits)),
        usage_estimate=controller_usage(limits).part,
        cycles_estimate=controller_cycles(table),
    )
