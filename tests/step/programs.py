"""Step programs that the tests share."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.table import Limits
from fastcar_compile.codegen.hls.step_program.builder import AttentionForm, CacheForm, LinearForm, ReplayForm, StepForm
from fastcar_compile.codegen.hls.step_program.program import StepProgram

HEADS = AttentionForm(4, 2, 32, rotary=32, table_rows=40, factor=0.25, cache=CacheForm(0, 40))


def plan(
    attention: AttentionForm = HEADS, layers: int = 2, rows: int = 2, replay: ReplayForm | None = None
) -> StepForm:
    """A decoder of four weight ports."""
    query, key = attention.heads * attention.head_dim, attention.key_heads * attention.head_dim
    return StepForm(
        layers=layers,
        rows=rows,
        ports=4,
        hidden=64,
        epsilon=1e-5,
        attention=attention,
        qkv=LinearForm(64, query + 2 * key, tile=4, tiles=-(-(query + 2 * key) // 16), words=512),
        o=LinearForm(query, 64, tile=4, tiles=4, words=256),
        mlp_words=1024,
        head=LinearForm(64, 17, tile=1, tiles=5, words=256),
        replay=replay,
    )


LIMITS = Limits(cores=1, table_words=64, query_words=1, key_words=1, instructions=64)
"""What cores.cpp loads."""


def binary(program: StepProgram) -> bytes:
    """A program in a table of two layers without gates."""
    return program.to_bytes(build_table(2, program.sizes.rows, 1, 7, [0.0] * 2))


def repaired(words: Sequence[int]) -> bytes:
    """These words as bytes, with the CRC-32 that fits them."""
    body = struct.pack(f"<{len(words) - 3}I", *words[3:])
    return struct.pack("<3I", *words[:2], zlib.crc32(body)) + body
