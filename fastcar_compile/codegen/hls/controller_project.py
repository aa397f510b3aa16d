"""The HLS sources of the TAS unit and DRS controller, and their test bench."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.interface import ControlSizes, KernelInterface, drs_interface
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.drs.gate import pack_heads
from fastcar_compile.drs.reader import words_of
from fastcar_compile.drs.simulator import CAPACITY, LayerCall, LayerTrace, run_layer
from fastcar_compile.drs.table import NO_LAYER, AttentionShape, DrsTable, Limits, build_table, table_words

BENCH_PATTERNS = 64
"""Values of the Index Register that the test bench tries at most."""


@dataclass(frozen=True)
class DrsSources:
    """The kernel's interface and its files, name -> text."""

    kernel: KernelInterface
    texts: dict[str, str]


def limits_of(table: DrsTable) -> Limits:
    """Return limits of a controller that holds this table and no more."""
    shape = table.attention
    return Limits(
        cores=table.cores,
        rows=table.rows,
        passes=-(-table.rows // table.cores),
        table_words=table_words(table.layers, table.rows),
        query_words=shape.query_words,
        key_words=shape.key_words,
    )


def table_of_sizes(design: Design) -> DrsTable:
    """Return a table of the design's sizes for a decoder of which nothing else is known: one head of the MLP's width."""
    spec = design.mlp
    shape = AttentionShape(1, 1, spec.hidden)
    zeros = [0.0] * spec.layers
    return build_table(spec.layers, spec.batch, spec.cores, 1, zeros, attention=shape, scales=[1.0] * spec.layers)


def control_sizes(table: DrsTable) -> ControlSizes:
    """Return what the arguments of a controller hold, for tables of this size."""
    shape, words = table.attention, table_words(table.layers, table.rows)
    return ControlSizes(words, table.rows * shape.query_words, table.rows * shape.key_words)


def emit_drs(table: DrsTable, limits: Limits) -> DrsSources:
    """Return top, configuration and test bench of a controller with these limits."""
    kernel = drs_interface(control_sizes(table))
    texts = {
        "fastcar_drs_config.hpp": render("fastcar_drs_config.hpp", limits=limits),
        "fastcar_drs.cpp": render("fastcar_drs.cpp", limits=limits, kernel=kernel),
        "drs_testbench.cpp": _testbench(table, kernel),
    }
    return DrsSources(kernel, texts)


def _testbench(table: DrsTable, kernel: KernelInterface) -> str:
    """Emit the test bench.

    Rows whose q is +1 replay and those with -1 compute, so that q makes the Index Register. The key is all ones.
    """
    bench = _bench_table(table)
    data, shape, layer, step = bench.to_bytes(), bench.attention, bench.layers - 1, bench.tokens_per_frame
    key = pack_heads(np.ones((bench.rows, shape.kv_heads, shape.head_dim), np.float32))
    expected, held = [], None
    for register in range(min(1 << bench.rows, BENCH_PATTERNS)):
        signs = np.array([-1.0 if register >> row & 1 else 1.0 for row in range(bench.rows)], np.float32)
        query = pack_heads(np.broadcast_to(signs[:, None, None], (bench.rows, shape.heads, shape.head_dim)))
        trace = run_layer(data, LayerCall(layer, step, query, key, np.zeros(bench.rows, np.int32), held))
        expected.append([f"0x{word:08x}u" for word in _result_words(trace)])
        held = trace.held
    return render(
        "drs_testbench.cpp",
        kernel=kernel,
        patterns=BENCH_PATTERNS,
        capacity=CAPACITY,
        table=[f"0x{word:08x}u" for word in words_of(data)],
        bench=bench,
        layer=layer,
        step=step,
        expected=expected,
    )


def _bench_table(table: DrsTable) -> DrsTable:
    """Return a table of the same sizes, so that co-simulation maps all of it, but every layer has a gate at 0, pairs and chains are free."""
    layers, shape = table.layers, table.attention
    return build_table(
        *(layers, table.rows, table.cores, table.tokens_per_frame, [0.0] * layers),
        attention=shape,
        scales=[shape.head_dim**-0.5] * layers,
        prefetch=[4096] * layers,
    )


def _result_words(trace: LayerTrace) -> list[int]:
    """Return status, Index Register, held layer, number of records, their words, scores of every row."""
    held = NO_LAYER if trace.held is None else trace.held
    words = [int(trace.status), trace.index_register, held, len(trace.records)]
    words += [word for record in trace.records for word in record.words]
    return words + [int(bits) for bits in np.array(trace.scores, np.float32).view(np.uint32)]
