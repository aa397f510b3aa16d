"""Step programs that the tests share."""

from collections.abc import Sequence
from dataclasses import replace

from hls.library import zcu102

from fastcar_compile.artifact.engine import EngineProduct, MlpSpec
from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.table import Limits
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.spec import DraftSpec
from fastcar_compile.codegen.hls.step_program.builder import (
    AttentionForm,
    CacheForm,
    NormForm,
    ReplayForm,
    step_program,
)
from fastcar_compile.codegen.hls.step_program.program import StepProgram

HEADS = AttentionForm(4, 2, 32, rotary=32, table_rows=40, factor=0.25, cache=CacheForm(0, 40))


def built(
    attention: AttentionForm = HEADS,
    layers: int = 2,
    rows: int = 2,
    replay: ReplayForm | None = None,
    drafts: Sequence[DraftSpec] = (),
    *,
    layer_norms: bool = False,
    headed: bool = True,
) -> StepProgram:
    """The step program of a decoder on four weight ports."""
    query, key = attention.heads * attention.head_dim, attention.key_heads * attention.head_dim
    linears = {"head": EngineProduct(64, 17, 4, tile=1, tiles=5)} if headed else {}
    for n in range(layers):
        linears[f"layer_{n}.qkv"] = EngineProduct(64, query + 2 * key, 4, tile=4, tiles=-(-(query + 2 * key) // 16))
        linears[f"layer_{n}.o"] = EngineProduct(query, 64, 4, tile=4, tiles=4)
    mlp = MlpSpec(64, 96, rows, layers, cores=1)
    design = Design(mlp, zcu102(), 4, EngineProduct(64, 192, 4).cut(64), EngineProduct(96, 64, 4).cut(64), linears)
    design = replace(design, drafts={d.name: d.products(mlp, 4).cut(64) for d in drafts})
    return step_program(design, attention, NormForm(1e-5, layer=layer_norms), replay)


LIMITS = Limits(cores=1, table_words=64, query_words=1, key_words=1, instructions=64)
"""What cores.cpp loads."""


def binary(program: StepProgram) -> bytes:
    """A program in a table of two layers without gates."""
    return program.to_bytes(build_table(2, program.sizes.rows, 1, 7, [0.0] * 2))
