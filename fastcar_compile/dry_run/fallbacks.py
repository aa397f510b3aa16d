"""What runs in another way than the options ask for, and why."""

from __future__ import annotations

import platform
import shutil
from collections import defaultdict
from collections.abc import Iterator

import torch

from fastcar_compile.codegen.tvm.emit import cross_compiler
from fastcar_compile.config import CompileConfig
from fastcar_compile.dry_run.report import Fallback
from fastcar_compile.errors import CompileError
from fastcar_compile.formats.quant import ACCELERATED
from fastcar_compile.gates import decided_on_accelerator
from fastcar_compile.ir.layers import layer_of
from fastcar_compile.ir.modules import with_branches
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import module_path_of, where
from fastcar_compile.ir.query import is_op
from fastcar_compile.passes.patterns.linear_calls import linear_calls
from fastcar_compile.targets import Target, has_accelerator


def fallbacks_of(program: DecoderProgram, config: CompileConfig, board: Target) -> list[Fallback]:
    """Return everything that the rewritten program does in another way than the options ask for."""
    found = list(_unquantised(program, config))
    if has_accelerator(config, board):
        found += _gates(program) if config.offload != "all" else []
        found += _linears(program) if config.offload == "linears" else []
    elif board.kind == "fpga":
        found.append(
            Fallback(
                kind="accelerator",
                what="MLPs",
                layers=tuple(site.layer for site in program.sites),
                instead=f"the CPU of {board.name} computes them: no accelerator kernel is emitted",
                reason=f"the kernels are int8, and quant is {config.quant!r}",
                hint=f"choose quant {' or '.join(ACCELERATED)}",
            )
        )
    if program.prefill is None and config.chunk > 1:
        found.append(
            Fallback(
                kind="prompt",
                what="prompt",
                instead="it goes through the decode step, token by token",
                reason="an exported program holds the decode step alone",
                hint="compile the module itself, or choose a prefill chunk of 1",
            )
        )
    return found + list(_board_libraries(board))


def assumed_frame(frame: int) -> Fallback:
    """Return that nobody said how many tokens a frame has."""
    return Fallback(
        kind="assumption",
        what="tokens_per_frame",
        instead=f"{frame} is assumed",
        reason="the model's config gives none",
        hint="give tokens_per_frame (--tokens-per-frame)",
    )


def refuse_fallbacks(found: list[Fallback]) -> None:
    """Raise CompileError with every fallback and its reason; nothing where there is none."""
    problems = [
        CompileError(f"{f.what}{_layers(f.layers)}: {f.instead}; {f.reason}", where=f.where, hint=f.hint) for f in found
    ]
    if problems:
        raise CompileError.collect(problems)


def _layers(layers: tuple[int, ...]) -> str:
    if not layers:
        return ""
    return f" of layer {layers[0]}" if len(layers) == 1 else f" of layers {', '.join(map(str, layers))}"


def _unquantised(program: DecoderProgram, config: CompileConfig) -> Iterator[Fallback]:
    """Yield the linears whose weights stay float32 although a quantisation was chosen."""
    if config.quant == "none":
        return
    for graph in with_branches(program.graph_module):
        for node in graph.graph.nodes:
            if not is_op(node, torch.ops.aten.linear):
                continue
            layer = layer_of(node)
            yield Fallback(
                kind="numbers",
                what=f"linear {module_path_of(node) or node.name}",
                layers=() if layer is None else (layer,),
                instead="it is computed in float32",
                reason="its weight is computed in the graph, so it cannot be quantised at compile time",
                where=where(node),
                hint="make the weight a parameter of the model, or choose quant 'none'",
            )


def _gates(program: DecoderProgram) -> Iterator[Fallback]:
    """Yield the gates that the host decides."""
    layers: dict[str, list[int]] = defaultdict(list)
    for site in program.sites:
        if site.replay is not None and not decided_on_accelerator(site.replay.gate):
            layers[site.replay.gate].append(site.layer)
    for gate, found in layers.items():
        reason = f"the DRS controller has no unit for gate {gate}"
        hint = "choose one that it has: tas, input_delta, bound, learned"
        place, what = tuple(found), "gate"
        yield Fallback(kind="gate", what=what, layers=place, instead="the host decides", reason=reason, hint=hint)


def _linears(program: DecoderProgram) -> Iterator[Fallback]:
    """Yield the linears that the host keeps with offload="linears"."""
    for linear in linear_calls(program)[1]:
        yield Fallback(
            kind="linear",
            what=f"linear {linear.path}",
            layers=() if linear.layer is None else (linear.layer,),
            instead="the host computes it",
            reason=linear.reason,
            where=linear.path,
            hint="compile with offload mlp, where every linear outside of the MLPs is the host's",
        )


def _board_libraries(board: Target) -> Iterator[Fallback]:
    """Yield that the board's programs cannot be linked here."""
    if board.kind != "fpga":
        return
    compiler = cross_compiler(board.host_triple, f"{platform.machine()}-linux-gnu")
    if shutil.which(compiler) is None:
        yield Fallback(
            kind="library",
            what="host programs of the board",
            instead="they are written as object files, not as a library",
            reason=f"{compiler} is not on PATH",
            hint=f"install it (Debian: g++-{board.host_triple})",
        )
