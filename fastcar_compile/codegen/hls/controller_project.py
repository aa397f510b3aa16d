"""The HLS sources of the TAS unit and DRS controller, and their test bench."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcar_compile.codegen.hls.control_table.builder import GateScore, build_table
from fastcar_compile.codegen.hls.control_table.gate import Array, network_words, pack_inputs, pack_network
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall, LayerTrace, run_layer
from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, AttentionShape, DrsTable, Limits
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.interface import ControlSizes, KernelInterface, drs_interface
from fastcar_compile.codegen.hls.render import render
from fastcar_compile.gates.base import GateInputs, GateKind

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
        table_words=table.words,
        query_words=max(table.row_query_words, 1),
        key_words=max(table.row_key_words, table.input_words, 1),
        gate=table.gate,
        units=max(table.units, 1),
        heads=shape.heads if table.gate is GateKind.BOUND else table.weighted_heads,
    )


def table_of_sizes(design: Design) -> DrsTable:
    """Return a table of the design's sizes for a decoder of which nothing else is known: one head of the MLP's width."""
    spec = design.mlp
    shape = AttentionShape(1, 1, spec.hidden)
    zeros = [0.0] * spec.layers
    return build_table(spec.layers, spec.batch, spec.cores, 1, zeros, attention=shape, scales=[1.0] * spec.layers)


def control_sizes(table: DrsTable) -> ControlSizes:
    """Return what the arguments of a controller hold, for tables of this size."""
    network = network_words(table.units, FLOATS_PER_WORD * table.input_words) if table.units else 0
    return ControlSizes(table.words, max(table.query_words, 1), max(table.key_words + network, 1))


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

    q and x of a row are +1 where it replays and -1 where it computes, so that they make the Index Register. The key and
    the cached x are all ones.
    """
    bench = _bench_table(table)
    data, layer, step = bench.to_bytes(), bench.layers - 1, bench.tokens_per_frame
    network = _bench_network(bench) if bench.units else None
    expected = []
    for register in range(min(1 << bench.rows, BENCH_PATTERNS)):
        signs = np.array([-1.0 if register >> row & 1 else 1.0 for row in range(bench.rows)], np.float32)
        operands = pack_inputs(_bench_inputs(bench, signs))
        call = LayerCall(layer, step, *operands, np.zeros(bench.rows, np.int32), network)
        expected.append([f"0x{word:08x}u" for word in _result_words(run_layer(data, call))])
    return render(
        "drs_testbench.cpp",
        kernel=kernel,
        patterns=BENCH_PATTERNS,
        table=[f"0x{word:08x}u" for word in np.frombuffer(data, np.uint32)],
        network=[] if network is None else [f"0x{word:08x}u" for word in network.view(np.uint32).reshape(-1)],
        bench=bench,
        layer=layer,
        step=step,
        expected=expected,
    )


def _bench_inputs(bench: DrsTable, signs: Array) -> GateInputs[Array]:
    """Return what the gate reads, each row with its sign."""
    shape, rows, width = bench.attention, bench.rows, FLOATS_PER_WORD * bench.input_words
    heads, x = (None, None), (None, None)
    if bench.gate.reads_query:
        query = np.broadcast_to(signs[:, None, None], (rows, shape.heads, shape.head_dim))
        heads = (query, np.ones((rows, shape.kv_heads, shape.head_dim), np.float32))
    if bench.gate.reads_input:
        x = (np.broadcast_to(signs[:, None], (rows, width)), np.ones((rows, width), np.float32))
    return GateInputs(*heads, *x)


def _bench_network(bench: DrsTable) -> Array:
    """Return the words of a network of one unit, which adds the changes of x."""
    width = FLOATS_PER_WORD * bench.input_words
    w1 = np.concatenate([np.zeros(width), np.full(width, 2.0**-8)]).astype(np.float32)[None]
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    return pack_network(w1, zero, one, zero)


def _bench_table(table: DrsTable) -> DrsTable:
    """Return a table of the same sizes, so that co-simulation maps all of it, but every layer has a gate, pairs and chains are free.

    A row that does not change replays, one whose sign changes computes. Of weighted heads the first one counts.
    """
    layers, kind = table.layers, table.gate
    score = GateScore(
        kind,
        width=FLOATS_PER_WORD * table.input_words,
        units=table.units,
        heads=None if table.head_weights is None else (((0, 1.0),),) * layers,
        distance_weight=table.distance_weight,
    )
    return build_table(
        *(layers, table.rows, table.cores, table.tokens_per_frame),
        [-(2.0**-10) if kind.at_most else 0.0] * layers,
        attention=table.attention,
        scales=[table.attention.head_dim**-0.5] * layers,
        refresh_every=2 if table.refresh_period else None,
        gate=score,
    )


def _result_words(trace: LayerTrace) -> list[int]:
    """Return status, Index Register, scores of every row."""
    scores = np.array(trace.scores, np.float32).view(np.uint32).tolist()
    return [int(trace.status), trace.index_register, *scores]
