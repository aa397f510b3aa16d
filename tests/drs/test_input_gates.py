"""Every gate besides the mean TAS: the HLS controller, the Python simulator and the operators decide alike."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exact.cases import KINDS, values
from hls.conftest import csim_tools

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from drs.tables import FRAME, LATER, Controller
from drs.unit import DrsUnit, build_controller
from fastcar_compile.codegen.hls.control_table.builder import GateScore, build_table
from fastcar_compile.codegen.hls.control_table.reader import check
from fastcar_compile.codegen.hls.control_table.simulator import LayerCall
from fastcar_compile.codegen.hls.control_table.table import (
    AttentionShape,
    DrsTable,
    Limits,
    TableStatus,
    pack_inputs,
    pack_network,
)
from fastcar_compile.gates import GATES, decided_on_accelerator
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.tensors import exact_weights

fastcar = torch.ops.fastcar
__all__ = ["csim_tools"]

ROWS, WIDTH, LAYERS, UNITS = 4, 37, 2, (5, 3)
HEADS = AttentionShape(6, 2, 10)
SCALE = 0.3
CHOSEN = ((1, 0.5), (4, -1.25), (5, 3.0))


@dataclass(frozen=True)
class Case:
    """A score, and the operator that defines it."""

    score: GateScore
    operator: Callable[[GateInputs[torch.Tensor], int], torch.Tensor]

    @property
    def at_most(self) -> bool:
        return self.score.kind.at_most

    def table(self, threshold: float, refresh_every: int | None = None) -> DrsTable:
        """A table whose layers replay where the score passes `threshold`."""
        sign = -1 if self.at_most else 1
        sizes = (LAYERS, ROWS, 2, FRAME, [sign * threshold] * LAYERS)
        shape = HEADS if self.score.kind.reads_query else None
        options = {"scales": [SCALE] * LAYERS, "gate": self.score, "refresh_every": refresh_every}
        return build_table(*sizes, attention=shape, **options)


def network(layer: int) -> tuple[torch.Tensor, ...]:
    """w1 as bfloat16, b1, w2, b2."""
    torch.manual_seed(layer)
    units = UNITS[layer]
    w1 = exact_weights(torch.randn(units, 2 * WIDTH) / WIDTH**0.5)
    return w1, torch.randn(units), torch.randn(units), torch.randn(1)


def words_of(layer: int) -> np.ndarray:
    """The network as the kernel reads it."""
    return pack_network(*(t.float().numpy() for t in network(layer)))


def at_zero(inputs: GateInputs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key cache of one row, and its position."""
    assert inputs.query is not None
    assert inputs.key is not None
    return inputs.query[:, :, None], inputs.key[:, :, None], torch.zeros(1, dtype=torch.int64)


def weighted(inputs: GateInputs[torch.Tensor], layer: int) -> torch.Tensor:
    """Chosen heads in layer 1, the mean over all heads in layer 0."""
    if layer == 0:
        return fastcar.tas(*at_zero(inputs), 0, SCALE)
    heads, weights = zip(*CHOSEN, strict=True)
    return fastcar.tas_heads(*at_zero(inputs), 0, SCALE, list(heads), list(weights))


CASES = {
    "tas": Case(GateScore(heads=(None, CHOSEN)), weighted),
    "input_delta": Case(GateScore(GateKind.INPUT_DELTA, WIDTH), lambda v, _n: fastcar.input_delta(v.x, v.cached)),
    "learned": Case(
        GateScore(GateKind.LEARNED, WIDTH, max(UNITS)), lambda v, n: fastcar.learned_score(v.x, v.cached, *network(n))
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


def controller_of(name: str, folder: Path) -> Controller:
    """A controller that is built for this gate."""
    limits = CASES[name].table(0.5).limits
    return Controller(DrsUnit(build_controller(limits, folder)), limits)


def drawn(name: str, seed: int) -> GateInputs[np.ndarray]:
    """What the gate reads: rows of every kind that change more or less since they were cached."""
    random, kind = np.random.default_rng(seed), CASES[name].score.kind
    hard = KINDS[seed % len(KINDS)]

    def pair(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        now, other = values(hard, (ROWS, *shape), random), values(hard, (ROWS, *shape), random)
        change = random.uniform(0, 1.2, (ROWS, *(1 for _ in shape))).astype(np.float32)
        return now, now / 2 + change * other / 4

    query, key = pair(HEADS.heads, HEADS.head_dim) if kind.reads_query else (None, None)
    x, cached = pair(WIDTH) if kind.reads_input else (None, None)
    return GateInputs(query, None if key is None else key[:, : HEADS.kv_heads], x, cached)


def call_of(name: str, layer: int, inputs: GateInputs[np.ndarray], step: int = LATER) -> LayerCall:
    """A call on these rows."""
    own = words_of(layer) if name == "learned" else None
    return LayerCall(layer, step, *pack_inputs(inputs), np.zeros(ROWS, np.int32), network=own)


def score_of(name: str, layer: int, inputs: GateInputs[np.ndarray]) -> np.ndarray:
    """By the operator."""
    tensors = (None if v is None else torch.from_numpy(v) for v in vars(inputs).values())
    return CASES[name].operator(GateInputs(*tensors), layer).numpy()


def test_every_gate_of_this_package_but_studies_is_decided_by_the_controller() -> None:
    assert set(CASES) == {kind.name.lower() for kind in GateKind} == {n for n, gate in GATES.items() if not gate.study}
    assert all(decided_on_accelerator(name) is not gate.study for name, gate in GATES.items())
    assert not decided_on_accelerator("of another package")


@pytest.mark.usefixtures("csim_tools")
@pytest.mark.parametrize("name", CASES)
def test_decisions_are_those_of_the_operator(name: str, folder: Path) -> None:
    assert_decisions(name, controller_of(name, folder))


def assert_decisions(name: str, unit: Controller) -> None:
    """Every row alone, and one that is not finite."""
    case = CASES[name]
    sign = -1 if case.at_most else 1
    replayed = set()
    for seed in range(4 * len(KINDS)):
        inputs, layer = drawn(name, seed), seed % LAYERS
        if seed == 5:
            spoilt = inputs.key if inputs.cached is None else inputs.cached
            assert spoilt is not None
            spoilt[1, ..., 3] = np.nan
        expected = score_of(name, layer, inputs)
        known = expected[np.isfinite(expected)]
        threshold = float(np.median(known)) if known.size else 0.0
        trace = unit.agreed(case.table(threshold), call_of(name, layer, inputs))
        np.testing.assert_array_equal(sign * np.array(trace.scores, np.float32), expected)
        rows = [not trace.index_register >> row & 1 for row in range(ROWS)]
        passed = expected <= np.float32(threshold) if case.at_most else expected >= np.float32(threshold)
        assert rows == passed.tolist()
        assert list(trace.chain) == [int(r) for r in rows]
        replayed.add(tuple(rows))
    assert len(replayed) > 2


@pytest.mark.usefixtures("csim_tools")
def test_a_kernel_takes_tables_of_its_own_gate_only(folder: Path) -> None:
    """And networks of at most the units, and heads of at most the number, that it was built for."""
    delta = controller_of("input_delta", folder)
    learned = CASES["learned"]
    assert delta.kernel.load(learned.table(0.5).to_bytes()) is TableStatus.BAD_HEADER
    more = replace(learned, score=replace(learned.score, units=max(UNITS) + 1)).table(0.5)
    assert controller_of("learned", folder).kernel.load(more.to_bytes()) is TableStatus.BAD_HEADER
    weighted = CASES["tas"].table(0.5).to_bytes()
    assert check(weighted, Limits(heads=HEADS.heads - 1)) is TableStatus.BAD_HEADER
    assert check(weighted, Limits(heads=HEADS.heads)) is TableStatus.OK
