"""Clocks of linears, MLPs and decisions: the RTL in Verilator against the closed form that `estimate` uses.

    python benchmarks/rtl_cycles.py --docs        # writes docs/measurements/rtl_cycles.md

The designs are those of exploration with the most ports. The memory has the latency, rate and refreshes of the board,
for all ports together. Clocks count from the first word of a call to the last one of its result: rows in, quantised,
multiplied, scaled, out. A decision's words are on chip: it counts keys, q, scores and thresholds. Every result is
compared with the emitted C++ and with what defines it, bit for bit.
"""

import argparse
import ctypes
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from pages import MEASUREMENTS, ROOT, write_table

import fastcar_compile as fc
from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.codegen.hls.control_table.builder import build_table
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, pack_rows
from fastcar_compile.codegen.hls.design.controller import decision_loops
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import budget_of, designs
from fastcar_compile.codegen.hls.design.loops import places_loop
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.design.usage import ROW_PORTS
from fastcar_compile.codegen.hls.model.engine import Engine
from fastcar_compile.codegen.hls.project import table_of_sizes
from fastcar_compile.codegen.hls.step_program.instruction import Instruction
from fastcar_compile.codegen.hls.step_program.instructions import Linear, Mlp
from fastcar_compile.codegen.hls.step_program.program import read_program
from fastcar_compile.config.targets import load_target
from fastcar_compile.runtime.backends import hls_csim
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of

sys.path.insert(0, str(ROOT / "tests"))

from decoders import llama
from drs.tables import FRAME, LATER, Controller
from drs.unit import DrsUnit
from hls.library import best
from rtl.simulation import ENGINE, Builder, EngineBench, Work, loaded

PLACED = places_loop().cycles
"""Clocks of a call that the controller takes before it sends it: each row gets a core and a pass."""


@dataclass(frozen=True)
class Case:
    """A linear on a design that exploration finds for a decoder.

    Args:
        hidden, intermediate: of the decoder's MLP. linears: those that are measured: name, inputs, channels.
        rows: of the batch, all of which compute. cores: of the design.
        axi_bits: of other AXI ports than the board has, of which two carry weights.
    """

    board: str
    decoder: str
    hidden: int
    intermediate: int
    quant: str
    rows: int
    cores: int
    linears: tuple[tuple[str, int, int], ...]
    axi_bits: int | None = None

    def place(self, ports: int) -> str:
        """The first columns of the table."""
        of_ports = f"{ports}, {self.axi_bits} bits" if self.axi_bits else str(ports)
        return f"{self.board} | {self.decoder} {self.quant} | {of_ports} | {self.rows} on {self.cores}"

    @property
    def design(self) -> Design:
        """The design with the most ports."""
        spec = MlpSpec(self.hidden, self.intermediate, batch=self.rows, layers=1, cores=self.cores, quant=self.quant)
        own = [LinearSpec(*linear) for linear in self.linears]
        budget = budget_of(load_target(self.board))
        if self.axi_bits is not None:
            budget = replace(budget, axi_bits=self.axi_bits, axi_ports=2 + ROW_PORTS)
        return best(designs(spec, budget, own))


VILA = (("o, 256 channels", 4096, 256),)
GAME = (("qkv", 256, 384), ("o", 256, 256), ("head", 256, 1024))
TINY = (("qkv", 2048, 2560), ("o", 2048, 2048))
CASES = (
    Case("zcu102", "VILA-U 7B", 4096, 11008, "w4a8", 1, 1, VILA),
    Case("zcu102", "VILA-U 7B", 4096, 11008, "w4a8", 8, 8, VILA),
    Case("zcu102", "VILA-U 7B", 4096, 11008, "w8a8", 2, 2, VILA),
    Case("kv260", "game", 256, 1536, "w8a8", 1, 1, GAME),
    Case("kv260", "game", 256, 1536, "w4a8", 4, 2, GAME),
    Case("zcu104-sodimm", "TinyLlama", 2048, 5632, "w4a8", 1, 1, TINY),
    Case("zcu104-sodimm", "TinyLlama", 2048, 5632, "w4a8", 1, 1, TINY, axi_bits=512),
)


@dataclass(frozen=True)
class Row:
    """A line of the table: clocks of the RTL and of the closed form.

    Args:
        place: board, decoder, weight ports, and rows on cores. call: what was computed.
    """

    place: str
    call: str
    rtl: int
    model: float

    @property
    def ratio(self) -> float:
        """Clocks of the RTL for each of the model."""
        return self.rtl / self.model

    @property
    def text(self) -> str:
        """The line in Markdown."""
        return f"| {self.place} | {self.call} | {self.rtl:,} | {self.model:,.0f} | {self.ratio:.3f} |"


def measure(case: Case, builder: Builder) -> list[Row]:
    """Return the clocks of every linear of a case, and of its MLP; `builder` builds its RTL."""
    made, target, rng = case.design, load_target(case.board), np.random.default_rng(0)
    engine = Engine(made, target, table_of_sizes(made))
    name = f"{case.board}_{case.decoder}_{case.quant}_{case.rows}_{made.axi_words}".replace(" ", "_")
    # A whole MLP takes longer than its build.
    bench, found = EngineBench(made, replace(builder, optimise="-O1"), name), []
    mlp = [LinearSpec("", product.inputs, product.channels) for product in (made.gate_up, made.down)]
    for what, *shapes in (*((own[0], LinearSpec(*own)) for own in case.linears), ("MLP", *mlp)):
        call = engine.array_call(shapes, replace(made.load(case.rows), bypasses=True), on_chip=True, stays=True)
        parts = [part.seconds for part in engine.parts(call) if part.unit != "drs"]
        x = rng.normal(size=(case.rows, shapes[0].inputs)).astype(np.float32)
        own = made.linears.get(what)
        work = Work.mlp(made, x, rng) if own is None else Work.linear(made, own, x, rng)
        clocks = bench.run(work, (1 << case.rows) - 1, engine.memory)
        found.append(Row(case.place(made.ports), what, clocks, sum(parts) * engine.clock_hz - PLACED))
    return found


DECISIONS = (("VILA-U 7B", AttentionShape(32, 32, 128)), ("game", AttentionShape(4, 1, 64)))
DECIDED = ("load_key", "row_sum", "scores_of_rows", "rows_that_pass")
"""Functions whose loops the RTL of a decision has."""


def decide(decoder: str, shape: AttentionShape, builder: Builder) -> list[Row]:
    """Return the clocks of decisions of one and of eight rows with gate `tas`."""
    rng, found = np.random.default_rng(0), list[Row]()
    limits = build_table(1, 8, 1, FRAME, [0.0], attention=shape, scales=[1.0]).limits
    options, name = (f"-GKEY_WORDS={limits.key_words}",), f"decide_{decoder}".replace(" ", "_")
    path = builder.build(CASES[0].design, Path("fastcar_decide.sv"), "decide.cpp", name, *options, limits=limits)
    controller, clocks = Controller(DrsUnit(path), limits), ctypes.c_int64.in_dll(ctypes.CDLL(str(path)), "clocks")
    for rows in (1, 8):
        table = build_table(1, rows, 1, FRAME, [0.0], attention=shape, scales=[1.0])
        heads = (rng.normal(size=(rows, n, shape.head_dim)).astype(np.float32) for n in (shape.heads, shape.kv_heads))
        query, key = map(pack_rows, heads)
        controller.agreed(table, LayerCall(0, LATER, query, key, np.zeros(rows, np.int32)))
        model = sum(loop.cycles for loop in decision_loops(table) if loop.process in DECIDED)
        found.append(Row(f"any | {decoder} | - | {rows}", "decision", clocks.value, model))
    return found


WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1536, "num_key_value_heads": 1, "vocab_size": 1024}


def token(builder: Builder) -> list[Row]:
    """Return the clocks of all linears and MLPs of a token, in whole steps of two layers of the game's sizes.

    The controller is the emitted C++, and calls the RTL; the logits are those of backend `cpu`.
    """
    options: dict[str, Any] = {"target": "kv260", "quant": "w8a8", "offload": "all", "engine": "rtl", "replay": None}
    built = fc.compile(llama(**WIDE), tokens_per_frame=8, output=builder.folder / "token", prefill_chunk=1, **options)
    section = accelerator_of(built)
    made, data = Design.of(section.design), (built.path / section.table).read_bytes()
    table, program = read_table(data), read_program(data)
    whole = table, StepDesign.of(program, made.group)
    path = replace(builder, optimise="-O1").build(made, ENGINE, "engine.cpp", "token_rtl", whole=whole)
    engine = Engine(made, load_target("kv260"), table)
    library = loaded(path, engine.memory)
    with patch.object(hls_csim, "open_library", lambda *_: library):
        sessions = [built.session(backend=name) for name in ("hls-csim", "cpu")]
    clocks = ctypes.c_int64.in_dll(library, "fastcar_clocks")
    for session in sessions:
        session.prefill(torch.tensor([[5]]))
    before = clocks.value
    rtl, cpu = (session.step(torch.tensor([7])) for session in sessions)
    assert torch.equal(rtl, cpu)
    calls = [products for i in program.instructions if (products := _products(i, made))]
    parts = [engine.parts(engine.array_call(own, made.load(1), on_chip=True, stays=True)) for own in calls]
    model = sum(part.seconds for call in parts for part in call if part.unit != "drs") * engine.clock_hz
    model -= PLACED * len(calls)
    place = f"kv260 | game's sizes, two layers w8a8 | {made.ports} | 1 on 1"
    return [Row(place, f"a token: {len(calls)} calls", clocks.value - before, model)]


def _products(instruction: Instruction, made: Design) -> list[LinearSpec]:
    if isinstance(instruction, Linear):
        return [LinearSpec("", instruction.inputs, instruction.channels)]
    mlp = (made.gate_up, made.down) if isinstance(instruction, Mlp) else ()
    return [LinearSpec("", product.inputs, product.channels) for product in mlp]


HEAD = """| board | decoder | weight ports | rows on cores | call | RTL | model | ratio |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Print the table, and write it on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table of docs/measurements/rtl_cycles.md")
    arguments, lines = parser.parse_args(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder(Path(folder))
        measured = (measure(case, builder) for case in CASES)
        decided = (decide(*decision, builder) for decision in DECISIONS)
        for row in chain.from_iterable(chain(measured, [token(builder)], decided)):
            print(row.text, flush=True)
            lines.append(row.text + "\n")
    if arguments.docs:
        write_table(MEASUREMENTS / "rtl_cycles.md", "rows", HEAD + "".join(lines))


if __name__ == "__main__":
    main()
