"""Gates that read the input of an MLP: the HLS controller, the Python simulator and the operators decide alike."""

from __future__ import annotations

import ctypes
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hls.conftest import csim_tools

import fastcar_compile.ops  # noqa: F401  (registers the operators)
from drs.tables import FRAME, LATER, Controller
from fastcar_compile.codegen.hls.controller_project import control_sizes, emit_drs, limits_of
from fastcar_compile.codegen.hls.interface import drs_interface
from fastcar_compile.drs.gate import pack_heads
from fastcar_compile.drs.reader import check, read_table
from fastcar_compile.drs.scores import pack_network
from fastcar_compile.drs.simulator import LayerCall
from fastcar_compile.drs.table import AttentionShape, DrsTable, GateKind, Limits, Status, build_table
from fastcar_compile.errors import UserError
from fastcar_compile.gates.weight_tensors import exact_weights
from fastcar_compile.runtime.backends.accelerator import controller as kernels
from fastcar_compile.runtime.backends.hls_csim.build import build_library
from fastcar_compile.runtime.backends.hls_csim.unit import CsimUnit

fastcar = torch.ops.fastcar
__all__ = ["csim_tools"]

ROWS, WIDTH, LAYERS, UNITS = 4, 37, 2, (5, 3)
SHAPE = AttentionShape(1, 1, WIDTH)
KINDS = (GateKind.INPUT_DELTA, GateKind.LEARNED)


def table_of(kind: GateKind, threshold: float = 0.5) -> DrsTable:
    """A table whose layers replay where the score is at most `threshold`."""
    units = max(UNITS) if kind is GateKind.LEARNED else 0
    sizes = (LAYERS, ROWS, 2, FRAME, [-threshold] * LAYERS)
    return build_table(*sizes, attention=SHAPE, scales=[1.0] * LAYERS, gate=kind, units=units)


def network(layer: int) -> tuple[torch.Tensor, ...]:
    """w1 as bfloat16, b1, w2, b2."""
    torch.manual_seed(layer)
    units = UNITS[layer]
    w1 = exact_weights(torch.randn(units, 2 * WIDTH) / WIDTH**0.5)
    return w1, torch.randn(units), torch.randn(units), torch.randn(1)


def words_of(layer: int) -> np.ndarray:
    """The network as the kernel reads it."""
    return pack_network(*(t.float().numpy() for t in network(layer)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("input_gates")


def controller_of(kind: GateKind, folder: Path) -> Controller:
    """A controller that is built for this gate, with the networks in its memory."""
    table, own = table_of(kind), folder / kind.name
    if not own.exists():
        own.mkdir()
        for name, text in emit_drs(table, limits_of(table)).texts.items():
            (own / name).write_text(text)
        for path in files("hls_templates").iterdir():
            if path.name.endswith(".hpp"):
                (own / path.name).write_text(path.read_text())
    library = ctypes.CDLL(str(build_library(own, own / "build", ("fastcar_drs.cpp",))))
    kernel = kernels.Controller(CsimUnit(library, drs_interface(control_sizes(table)).part))
    if kind is GateKind.LEARNED:
        for layer in range(LAYERS):
            kernel.load_network(layer, words_of(layer).view(np.uint8).reshape(-1), table.key_words)
    return Controller(kernel, limits_of(table))


def call_of(kind: GateKind, layer: int, x: np.ndarray, cached: np.ndarray) -> LayerCall:
    """A call for rows x and their cached x, both float32 [B, H]."""
    query, key = (pack_heads(v[:, None]) for v in (x, cached))
    own = words_of(layer) if kind is GateKind.LEARNED else None
    return LayerCall(layer, LATER, query, key, np.zeros(ROWS, np.int32), network=own)


def score_of(kind: GateKind, layer: int, x: np.ndarray, cached: np.ndarray) -> np.ndarray:
    """By the operator."""
    given = (torch.from_numpy(x), torch.from_numpy(cached))
    if kind is GateKind.INPUT_DELTA:
        return fastcar.input_delta(*given).numpy()
    return fastcar.learned_score(*given, *network(layer)).numpy()


@pytest.mark.usefixtures("csim_tools")
@pytest.mark.parametrize("kind", KINDS)
def test_decisions_are_those_of_the_operator(kind: GateKind, folder: Path) -> None:
    """Every row alone, and one that is not finite."""
    unit, random = controller_of(kind, folder), np.random.default_rng(3)
    replayed = set()
    for seed in range(12):
        x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
        cached = (x + random.uniform(0, 1.2, (ROWS, 1)) * random.normal(size=x.shape)).astype(np.float32)
        if seed == 5:
            cached[1, 3] = np.nan
        layer = seed % LAYERS
        expected = score_of(kind, layer, x, cached)
        threshold = float(np.nanmedian(expected))
        trace = unit.agreed(table_of(kind, threshold), call_of(kind, layer, x, cached))
        np.testing.assert_array_equal(-np.array(trace.scores, np.float32), expected)
        rows = [not trace.index_register >> row & 1 for row in range(ROWS)]
        assert rows == (expected <= np.float32(threshold)).tolist()
        assert list(trace.chain) == [int(r) for r in rows]
        replayed.add(tuple(rows))
    assert len(replayed) > 2


@pytest.mark.usefixtures("csim_tools")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("threshold", "open_"), [(float("inf"), True), (-float("inf"), False)])
def test_the_thresholds_always_and_never(kind: GateKind, threshold: float, open_: bool, folder: Path) -> None:
    x = np.random.default_rng(4).normal(size=(ROWS, WIDTH)).astype(np.float32)
    trace = controller_of(kind, folder).agreed(table_of(kind, threshold), call_of(kind, 0, x, x + 1))
    assert trace.index_register == (0 if open_ else 0b1111)


@pytest.mark.usefixtures("csim_tools")
def test_a_kernel_takes_tables_of_its_own_gate_only(folder: Path) -> None:
    """And networks of at most the units that it was built for."""
    delta, learned = (controller_of(kind, folder) for kind in KINDS)
    for table in (table_of(GateKind.LEARNED), build_table(LAYERS, ROWS, 2, FRAME, [0.0] * LAYERS, attention=SHAPE)):
        assert delta.kernel.load(table.to_bytes()) is Status.BAD_HEADER
    more = build_table(
        LAYERS, ROWS, 2, FRAME, [0.0] * LAYERS, attention=SHAPE, gate=GateKind.LEARNED, units=max(UNITS) + 1
    )
    assert learned.kernel.load(more.to_bytes()) is Status.BAD_HEADER
    assert check(more.to_bytes(), limits_of(table_of(GateKind.LEARNED))) is Status.BAD_HEADER
    assert check(more.to_bytes(), Limits()) is Status.BAD_HEADER
    assert read_table(more.to_bytes()) == more


@pytest.mark.parametrize(
    ("kind", "units"), [(GateKind.LEARNED, 0), (GateKind.INPUT_DELTA, 3), (GateKind.LEARNED, 4097)]
)
def test_units_belong_to_a_network(kind: GateKind, units: int) -> None:
    with pytest.raises(UserError, match=f"a network of {units} units"):
        build_table(1, 1, 1, 1, [0.0], gate=kind, units=units)
