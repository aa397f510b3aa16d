"""A small decoder whole by its step program: C simulation and the simulator, bit for bit."""

import ctypes
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from fastcar_compile.codegen.hls.control_table.table import TableStatus
from fastcar_compile.codegen.hls.design.loops import tile_loops
from fastcar_compile.codegen.hls.design.spec import DraftSpec, LinearSpec
from fastcar_compile.codegen.hls.model.engine import Engine, EngineCall
from fastcar_compile.codegen.hls.step_program.cache_layout import Rows
from fastcar_compile.codegen.hls.step_program.instruction import Instruction, Place
from fastcar_compile.codegen.hls.step_program.instructions import Linear, Mlp
from fastcar_compile.codegen.hls.step_program.program import StepOp, StepProgram, StepStatus
from fastcar_compile.codegen.hls.step_program.replaying import Decide, DraftRows
from fastcar_compile.codegen.hls.step_program.simulator import StepSimulator
from fastcar_compile.config.targets import load_target
from fastcar_compile.gates.registry import GateKind
from step.conftest import BuildKernel
from step.decoder import HIDDEN, LAYERS, NORMED, ROTATED, Decoder, Gates, decoder
from step.kernel import Kernel
from step.values import Array, assert_same

SHARED, THREE = (replace(form, cache=replace(form.cache, shared=n)) for form, n in ((ROTATED, 2), (NORMED, 3)))
HEADROOM = 50
CHANGE = Gates(GateKind.INPUT_DELTA, 1.2, max_chain=2)

DECODERS = {
    "tas": decoder(ROTATED, "w8a8", Gates(heads=((0, 1.0), (3, -0.5)))),
    "tas, normed": decoder(NORMED, "w4a8", Gates(threshold=-1.0, couple_cfg=True, max_chain=2), axi_bits=256),
    "learned": decoder(
        *(NORMED, "w4a8", Gates(GateKind.LEARNED, 0.0, refresh_every=3, units=(3, 7))), layer_norms=True, headed=False
    ),
    "input_delta": decoder(
        *(ROTATED, "w8a8", replace(CHANGE, gated=(True, False))), rows=1, cores=2, drafts=[DraftSpec(0, 13, 5)]
    ),
    "tas, 2 of 2": decoder(SHARED, "w8a8", Gates(threshold=-1.0, couple_cfg=True), rows=4),
    "input_delta, 3 of 1": decoder(
        *(THREE, "w4a8", CHANGE), rows=3, axi_bits=256, cores=2, drafts=[DraftSpec(1, 6, 140, biased=True)]
    ),
}
"""Both quantisations. Gates that read q, x and a network, and x. The second has two weight ports on an
AXI port, and three query heads per key head, in runs of two and one. The third has layer norms and no head. The last
ones have several rows of a video, on a cache of all positions and on a ring. With `input_delta` a layer has a draft: of
less than a group and more, without biases and with, on one core and two."""

LAUNCHES = 40


class Videos:
    """Rows of launches: each video has positions and a prompt of its own, and a launch takes some of its next ones.

    Of those, where a video has several, all but the first may turn out wrong, and are taken again.
    """

    def __init__(self, made: Decoder, rng: np.random.Generator) -> None:
        self._sizes, self._rng = made.program.sizes, rng
        self._own = self._sizes.rows // self._sizes.videos
        self._next = rng.integers(0, 3, self._sizes.videos)
        self._prompt = self._next + rng.integers(2, 6, self._sizes.videos)
        self._before = np.zeros(self._sizes.rows, np.int64)

    def rows(self) -> Rows:
        """The rows of the next launch."""
        rng, own, taken = self._rng, self._own, self._rng.integers(0, self._own + 1, self._sizes.videos)
        video = np.arange(self._sizes.rows) // own
        positions = self._next[video] + np.arange(len(video)) % own
        steps = np.where(positions < self._prompt[video], -1, positions - self._prompt[video])
        right = np.minimum(taken, rng.integers(1, own + 1, self._sizes.videos))
        self._next += right
        active = (np.arange(len(video)) % own < taken[video]) & (positions < HEADROOM)
        rows = Rows(self._sizes.videos, positions, steps, active, self._before)
        if own > 1:
            self._before = np.where(rows.deciding & (np.arange(len(video)) % own < right[video]), steps + 1, 0)
        return rows


@pytest.fixture
def kernel(csim_tools: None, build_kernel: BuildKernel, gate: str) -> Kernel:
    """The kernel of a decoder's design, with its program and control table."""
    made = DECODERS[gate]
    found = build_kernel(made, group=2)
    assert found.load(made.program.to_bytes(made.table)) == TableStatus.OK
    return found


@pytest.mark.parametrize(
    "gate",
    [g if g in ("learned", "input_delta, 3 of 1") else pytest.param(g, marks=pytest.mark.thorough) for g in DECODERS],
)
def test_a_decoder_decodes_alike(kernel: Kernel, gate: str) -> None:
    """Outputs, caches and decisions of rows at positions of their own, past the RoPE table's end, around the ring."""
    made, rng = DECODERS[gate], np.random.default_rng(5)
    simulator = StepSimulator(made.program, made.memory())
    decisions = list[bool]()
    videos = Videos(made, rng)
    for _ in range(LAUNCHES):
        rows = videos.rows()
        x = (rng.normal(size=(len(rows.active), HIDDEN)) * 10.0 ** rng.uniform(-1, 1)).astype(np.float32)
        kernel.memory["outputs"][:] = 7
        want, got = simulator.run(x, rows), kernel.run(x, rows)
        assert_same(got[rows.active], want[rows.active])
        # An inactive row writes nothing.
        assert (got[~rows.active].view(np.uint32) == 0x07070707).all()
        keys, values = kernel.caches()
        np.testing.assert_array_equal(keys, simulator.memory.keys)
        np.testing.assert_array_equal(values, simulator.memory.values)
        np.testing.assert_array_equal(kernel.memory["replay"].view(np.uint32).reshape(-1, 4), simulator.memory.replay)
        for layer, computed in simulator.decided.items() if rows.deciding.any() else ():
            assert kernel.decided(layer) == computed.tolist()
            decisions += computed[rows.deciding].tolist()
    assert 0.2 < np.mean(decisions) < 0.9


def requests(made: Decoder, engine: Engine, rows: Rows, decided: dict[int, Array]) -> Iterator[EngineCall]:
    """The array's requests of a launch, as the estimate has them."""
    spec, design = made.made.mlp, made.made
    mlp = LinearSpec("", HIDDEN, 2 * spec.intermediate), LinearSpec("", spec.intermediate, HIDDEN)
    for one in made.program.instructions:
        computing = decided[one.layer] if rows.deciding.any() and one.layer in decided else rows.active
        if isinstance(one, Linear):
            shape = LinearSpec("", one.inputs, one.channels)
            yield engine.array_call([shape], design.load(int(rows.active.sum())), on_chip=True)
        elif isinstance(one, Mlp):
            yield engine.array_call(mlp, design.load(int(computing.sum())), on_chip=True)
        elif isinstance(one, DraftRows):
            replaying = int((rows.deciding & ~computing).sum())
            yield engine.draft_call(design.drafts[f"layer_{one.layer}.draft"], design.load(2 * replaying))


def counted(kernel: Kernel) -> tuple[int, int]:
    """Iterations of the array, one word of every weight port each, and beats of the AXI ports of weights, since the
    last call of this function."""
    counts = (ctypes.c_uint64 * 2)()
    kernel.library.fastcar_csim_counters(counts)
    return counts[0], counts[1]


@pytest.mark.thorough
def test_the_estimate_counts_what_a_kernel_with_drafts_does(csim_tools: None, build_kernel: BuildKernel) -> None:
    """Bytes of weights and iterations of the array, launch by launch: a draft's once for all rows that replay."""
    made, rng = DECODERS["input_delta, 3 of 1"], np.random.default_rng(5)
    kernel, simulator = build_kernel(made, 2, ("FASTCAR_COUNTERS",)), StepSimulator(made.program, made.memory())
    engine, videos, drafts = Engine(made.made, load_target("zcu102"), made.table), Videos(made, rng), 0
    assert kernel.load(made.program.to_bytes(made.table)) == TableStatus.OK
    for _ in range(LAUNCHES):
        rows, x = videos.rows(), rng.normal(size=(made.made.mlp.batch, HIDDEN)).astype(np.float32)
        counted(kernel)
        for runner in (kernel, simulator):
            runner.run(x, rows)
        (iterations, beats), size, steps = counted(kernel), 0, 0
        for call in requests(made, engine, rows, simulator.decided):
            drafts += call.last_load is not None and call.load.rows > 0
            for number, named in enumerate(call.products if call.load.rows else ()):
                loops = tile_loops(named.product, call.load_of(number), inner=named.inner)
                steps += named.product.tiles * loops.multiply.trips
                size += call.product_bytes(number)
        assert (beats * made.made.axi_words * 16, iterations) == (size, steps)
    assert drafts > 5


def with_changed(program: StepProgram, kind: type[Instruction], **changes: Any) -> StepProgram:
    """The program with other fields in every instruction of one kind."""
    listed = (replace(i, **changes) if isinstance(i, kind) else i for i in program.instructions)
    return replace(program, instructions=tuple(listed))


@pytest.mark.parametrize("gate", ["tas, 2 of 2"])
def test_what_the_kernel_does_not_hold_is_refused(kernel: Kernel, gate: str) -> None:
    """Sizes beyond its own, places that no unit joins, weights behind their section: nothing else is written."""
    program, table = DECODERS[gate].program, DECODERS[gate].table
    last = program.sizes.weight_words - 1

    def refused(status: StepStatus, number: int) -> None:
        kept = {name: array.copy() for name, array in kernel.memory.items() if name != "step_report"}
        assert kernel.launch(StepOp.RUN) == (status, number)
        for name, array in kept.items():
            np.testing.assert_array_equal(kernel.memory[name], array)

    for sizes in ({"ports": 3}, {"y_words": program.sizes.y_words + 1}):
        assert (
            kernel.load(replace(program, sizes=replace(program.sizes, **sizes)).to_bytes(table))
            == TableStatus.BAD_HEADER
        )
    assert kernel.load(b"no program") == TableStatus.TOO_SHORT
    refused(StepStatus.NOT_LOADED, 0)
    assert kernel.launch(op=7) == (StepStatus.NOT_LOADED, 0)
    kernel.give(np.zeros((program.sizes.rows, HIDDEN), np.float32), Rows.at(program.sizes, 3))
    unread = dict.fromkeys((field.name for field in fields(Decide)[4:]), 0)
    for kind, changes in (
        (Linear, {"weights": last}),
        (Linear, {"source": Place.INPUT, "target": Place.OUTPUT, "inputs": 4, "channels": 4, "tiles": 1}),
        (Mlp, {"weights": last}),
        (Mlp, {"source": Place.INPUT, "target": Place.OUTPUT}),
        (Decide, {"layer": LAYERS}),
        (Decide, {**unread, "gate": GateKind.INPUT_DELTA, "count": 1}),
    ):
        number = next(n for n, i in enumerate(program.instructions) if isinstance(i, kind))
        assert kernel.load(with_changed(program, kind, **changes).to_bytes(table)) == TableStatus.OK
        refused(StepStatus.NOT_HELD, number)
    assert kernel.load(program.to_bytes(table)) == TableStatus.OK
    assert kernel.launch(StepOp.RUN) == (StepStatus.DONE, 0)
    assert kernel.load(table.to_bytes()) == TableStatus.OK
    refused(StepStatus.NOT_LOADED, 0)


@pytest.mark.parametrize("gate", ["tas, 2 of 2"])
def test_a_row_of_another_video_is_refused(kernel: Kernel, gate: str) -> None:
    """Before anything is executed, and not where the row is inactive."""
    rows = Rows.at(DECODERS[gate].program.sizes, 3)
    kernel.give(np.zeros((len(rows.active), HIDDEN), np.float32), rows)
    words = rows.words()
    words[2, 2] = 2 | 1 << 16
    kernel.put("inputs", words)
    assert kernel.launch(StepOp.RUN) == (StepStatus.BAD_ROW, 2)
    assert not any(made.any() for made in kernel.caches())
    words[2, 2] = 2
    kernel.put("inputs", words)
    assert kernel.launch(StepOp.RUN) == (StepStatus.DONE, 0)
