"""Scores and rules of the gates: TVM and ONNX against the eager definitions bit for bit, those against formulas."""

import ctypes
import platform
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from conftest import check_module, check_tool, first_often
from exact.cases import values
from hls.sources import headers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lowering.kernel_runs import run
from onnx_export.test_ops import run_onnx
from torch import Tensor

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, runnable
from fastcar_compile.codegen.tvm.kernels import gate as scores
from fastcar_compile.codegen.tvm.kernels.gate import GateRules
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.gates.learned import unit_exponents
from fastcar_compile.gates.tensors import exact_weights
from fastcar_compile.runtime.backends.hls_csim import build_library
from fastcar_compile.tune.training.relaxed import LearnedScorer, Sample

from .cases import CASES as NETWORKS
from .score_backends import (
    ARGUMENTS,
    POSITION,
    Array,
    Score,
    Shape,
    argument_shapes,
    call,
    compiled,
    eager,
    exported,
    fastcar,
    reference,
)

# The gates' operators: TVM and ONNX against the eager definitions, those against plain formulas.


INF = float("inf")


def attention_inputs(seed: int, heads: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Query [rows, heads, 1, 8], key cache [rows, 2, 19, 8], position."""
    torch.manual_seed(seed)
    return torch.randn(rows, heads, 1, 8), torch.randn(rows, 2, 19, 8), torch.tensor([11])


@pytest.mark.parametrize("heads", [2, 6])
def test_tas_heads(heads: int) -> None:
    query, keys, at = attention_inputs(1, heads)
    chosen, weights = [1, 0], [2.0, -0.5]
    each = [0.3 * (query[:, h, 0] * keys[:, h // (heads // 2), 7]).sum(-1) for h in (0, 1)]
    expected = 2.0 * each[1] - 0.5 * each[0]
    torch.testing.assert_close(fastcar.tas_heads(query, keys, at, 4, 0.3, chosen, weights), expected)


def test_all_heads_alike_is_tas() -> None:
    query, keys, at = attention_inputs(2, 4)
    alike = fastcar.tas_heads(query, keys, at, 4, 0.3, [0, 1, 2, 3], [0.25] * 4)
    torch.testing.assert_close(alike, fastcar.tas(query, keys, at, 4, 0.3))
    assert torch.equal(
        fastcar.tas_heads(query, keys, at, 4, 0.3, [0, 1, 2, 3], [1.0] * 4), 4 * fastcar.tas(query, keys, at, 4, 0.3)
    )


@pytest.mark.parametrize(("layer", "step"), [(0, 0), (3, 2046), (31, 2**31 - 1)])
def test_random_score_is_the_same_number_everywhere(tmp_path: Path, layer: int, step: int) -> None:
    at = torch.tensor([step])
    eager = fastcar.random_score(at, 5, layer)
    assert torch.equal(run(scores.random_score(5, layer), at, torch.zeros(5))[-1], eager)
    assert torch.equal(run_onnx(fastcar.random_score.default, (at,), (5, layer), tmp_path / "op.onnx"), eager)


def test_random_scores_are_uniform_and_unrelated() -> None:
    """Kolmogorov-Smirnov distance of 16,384 numbers, and the correlation of neighbouring rows, layers and frames."""
    steps = torch.arange(4096)
    scores = torch.stack([fastcar.random_score(steps, 2, layer).reshape(4096, 2) for layer in (0, 1)])
    ordered = scores.flatten().sort().values
    assert ordered[0] > 0.0
    assert ordered[-1] <= 1.0
    ideal = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert (ordered - ideal).abs().max() < 1.63 / len(ordered) ** 0.5
    series = [scores[0, :-256, 0], scores[0, :-256, 1], scores[1, :-256, 0], scores[0, 256:, 0], scores[0, 1:-255, 0]]
    related = torch.corrcoef(torch.stack(series)) - torch.eye(5)
    assert related.abs().max() < 5 / len(series[0]) ** 0.5


def test_scores_of_many_forwards_are_those_of_each() -> None:
    """Calibration asks for many forwards at once."""
    steps = torch.tensor([3, 8, 300])
    together = fastcar.random_score(steps, 2, 1).reshape(3, 2)
    assert torch.equal(together, torch.stack([fastcar.random_score(s[None], 2, 1) for s in steps]))


def test_constant_score(tmp_path: Path) -> None:
    steps = torch.tensor([3])
    assert fastcar.constant_score(torch.tensor([3, 8]), 2, 0.5).tolist() == [0.5] * 4
    for value in (0.0, INF):
        onnx = run_onnx(fastcar.constant_score.default, (steps,), (2, value), tmp_path / f"{value}.onnx")
        assert onnx.tolist() == [value] * 2


@pytest.mark.parametrize(
    ("step", "refresh", "max_chain", "couple", "at_most"),
    [
        (6, 0, -1, False, True),
        (12, 2, -1, False, True),
        (11, 2, 1, False, False),
        (13, 3, -1, True, True),
        (18, 3, 2, True, True),
        (5, 2, -1, False, True),
    ],
)
def test_gate_with_refresh_and_comparison(
    tmp_path: Path, step: int, refresh: int, max_chain: int, couple: bool, at_most: bool
) -> None:
    """Stride 6: the rule word for word, eager, TVM and ONNX."""
    torch.manual_seed(step)
    own, limit = [0.5, 0.7, 0.4, -1.0], 0.5
    chain = torch.randint(0, 3, (6, 4), dtype=torch.int32)
    passes = [(s <= limit if at_most else s >= limit) and step >= 6 for s in own]
    passes = [p and not (refresh and step // 6 % refresh == 0) for p in passes]
    passes = [p and (max_chain < 0 or int(c) < max_chain) for p, c in zip(passes, chain[step % 6], strict=True)]
    if couple:
        passes = [passes[b % 2] and passes[b % 2 + 2] for b in range(4)]
    tensors = (torch.tensor(own), torch.tensor([limit]), torch.tensor([step]), chain)
    options = (6, max_chain, couple, refresh, at_most)
    assert fastcar.gate(*tensors, *options).tolist() == passes
    kernel = scores.gate(4, 6, GateRules(*options))
    assert run(kernel, chain, *tensors[:3], torch.zeros(4, dtype=torch.bool))[-1].tolist() == passes
    assert run_onnx(fastcar.gate.default, tensors, options, tmp_path / "op.onnx").tolist() == passes


@pytest.mark.parametrize("isa", first_often(INSTRUCTION_SETS), ids=lambda isa: isa.name)
def test_learned_score_on_every_instruction_set(isa: InstructionSet) -> None:
    """Compiled for each without a call of the C library. board/ runs it."""
    kernels = tvm.IRModule({case.name: case.kernel(isa) for case in NETWORKS})
    built = tvm.compile(kernels, target=host_target(isa))
    assembler = built.mod.inspect_source("asm")
    calls = re.findall(r"\b(?:callq?|bl)\s+(\w+)", assembler)
    assert not [name for name in calls if name.startswith(("__trunc", "__ext", "fabs", "fma"))]


# Scores bit for bit: eager, TVM, onnxruntime and numpy, ill-conditioned values included; the kernel's: tests/drs.


SHAPES = {"even": Shape(), "odd": Shape(rows=2, width=37, heads=3, kv_heads=1, dim=6, units=3)}
GATES = sorted(ARGUMENTS)
many = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KINDS = ("normal", "wide", "tiny", "huge", "outlier", "close", "equal", "ties", "bits", "zero")
NOT_FINITE = np.array([np.nan, np.inf, -np.inf], np.float32)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of fastcar_gate_core.hpp."""
    check_tool("g++")
    check_module("hls4ml")
    source = Path(__file__).with_name("gate_core.cpp")
    sources = headers() | {source.name: source.read_bytes()}
    return ctypes.CDLL(str(build_library(sources, tmp_path_factory.mktemp("gate_core"), [source.name])))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Score]]:
    """(gate, shape) -> backend -> score."""
    folder = tmp_path_factory.mktemp("scores")
    return {
        (gate, name): {
            "eager": eager(gate),
            "tvm": compiled(gate, shape),
            "onnxruntime": exported(gate, shape, folder / f"{gate}-{name}.onnx"),
        }
        for gate in GATES
        for name, shape in SHAPES.items()
    }


def drawn(shape: Shape, kind: str, weights: str, seed: int) -> dict[str, Array]:
    """Arguments of every gate, the network as `GateWeights` makes it."""
    random = np.random.default_rng(seed)
    arrays = {name: values(kind, s, random) for name, s in argument_shapes(shape).items()}
    network = {name: values(weights, argument_shapes(shape)[name], random) for name in ("w1", "b1", "w2", "b2")}
    arrays |= network | {"w1": exact_weights(torch.from_numpy(network["w1"].clip(-1e15, 1e15))).float().numpy()}
    if kind in ("close", "equal"):
        near = (1 + 1e-6 * (kind == "close") * random.normal(size=arrays["x"].shape)).astype(np.float32)
        arrays["cached"] = arrays["x"] * near
        arrays["keys"][:] = arrays["query"].mean(1, keepdims=True)
    return arrays | {"position": np.array([POSITION])}


@many
@given(st.sampled_from(sorted(SHAPES)), st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
@example("even", "normal", "normal", 0)
@example("odd", "bits", "bits", 1)
@example("even", "huge", "huge", 2)
def test_every_backend_has_the_same_bits(
    built: dict[tuple[str, str], dict[str, Score]], name: str, kind: str, weights: str, seed: int
) -> None:
    arrays = drawn(SHAPES[name], kind, weights, seed)
    for gate in GATES:
        expected = reference(gate)(arrays)
        for backend, score in built[gate, name].items():
            np.testing.assert_array_equal(score(arrays), expected, err_msg=f"{gate} {backend}", strict=True)


@pytest.mark.parametrize("at", ["x", "cached", "query", "keys"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_row_that_is_not_finite_never_replays(
    built: dict[tuple[str, str], dict[str, Score]], at: str, value: np.float32
) -> None:
    """Row 1: NaN, which passes no threshold. Gate `tas_heads` has its lower limit."""
    arrays = drawn(SHAPES["even"], "normal", "normal", 5)
    arrays[at][1] = np.where(np.arange(arrays[at][1].size).reshape(arrays[at][1].shape) % 3 == 1, value, arrays[at][1])
    for (gate, name), backends in built.items():
        reads = at in ARGUMENTS[gate]
        if name != "even":
            continue
        for backend, score in [*backends.items(), ("numpy", reference(gate))]:
            found, where = score(arrays), f"{gate} {backend}"
            assert np.isfinite(found[[0, 2]]).all(), where
            if gate == "tas_heads":
                assert not reads or found[1] < -1e5, where
            else:
                assert np.isnan(found[1]) == reads, where


@pytest.mark.parametrize("isa", runnable(INSTRUCTION_SETS, platform.machine(), cpu_flags()), ids=lambda isa: isa.name)
def test_every_instruction_set_has_the_same_bits(isa: object) -> None:
    for gate in GATES:
        score = compiled(gate, SHAPES["even"], isa)  # type: ignore[arg-type]
        for kind in KINDS:
            arrays = drawn(SHAPES["even"], kind, kind, 7)
            np.testing.assert_array_equal(score(arrays), reference(gate)(arrays), err_msg=f"{gate} {kind}")


@pytest.mark.parametrize("size", [0.02, 1.0, 50.0])
def test_a_network_s_scores_are_close_to_the_formula(size: float) -> None:
    """Of a decoder's sizes, activations from a hundredth to fifty: far below what a threshold can feel."""
    shape = Shape(rows=32, width=4096, heads=8, kv_heads=2, dim=128, units=16)
    random = np.random.default_rng(4)
    arrays = {n: random.normal(size=s).astype(np.float32) for n, s in argument_shapes(shape).items()}
    arrays["x"] *= np.float32(size)
    arrays["cached"] = arrays["x"] * (1 + 0.3 * random.normal(size=arrays["x"].shape)).astype(np.float32)
    arrays["w1"] = exact_weights(torch.from_numpy(arrays["w1"] / (64 * size))).float().numpy()
    x, cached, w1, b1, w2, b2 = (arrays[n].astype(np.float64) for n in ARGUMENTS["learned_score"])
    exact = np.maximum(np.concatenate([x, abs(x - cached)], 1) @ w1.T + b1, 0) @ w2 + b2
    assert np.abs(eager("learned_score")(arrays) - exact).max() < 1e-4


def test_the_bound_of_the_change() -> None:
    """(1 + score) * 2^-25 over the mean of |x|, and three roundings."""
    random = np.random.default_rng(6)
    x = (random.normal(size=(64, 256)) * 10.0 ** random.uniform(-5, 2, (64, 1))).astype(np.float32)
    cached = (x + random.normal(size=x.shape) * abs(x).mean(1, keepdims=True)).astype(np.float32)
    wide, before = x.astype(np.float64), cached.astype(np.float64)
    score = abs(wide - before).sum(1) / abs(wide).sum(1)
    bound = (1 + score) * 2.0**-25 / abs(x).mean(1) + 4 * 2.0**-24 * score
    assert (abs(reference("input_delta")({"x": x, "cached": cached}) - score) < bound).all()


def test_weights_are_exact_after_rounding() -> None:
    """At most 2^31 of the lowest bit in a unit, weights that matter are as given, and twice is once."""
    random = np.random.default_rng(8)
    for kind in KINDS:
        given = torch.from_numpy(values(kind, (8, 512), random).clip(-1e15, 1e15)).bfloat16()
        found = exact_weights(given.float())
        assert torch.equal(exact_weights(found), found)
        sizes = found.double().abs().sum(1)
        places = unit_exponents(found.float().numpy())
        assert (sizes <= torch.from_numpy(np.ldexp(2.0**31, places))).all()
        assert ((found.double() - given.double()).abs() <= sizes[:, None] * 2.0**-30 + 2.0**-99).all()


def test_square_roots_are_those_of_ieee(library: ctypes.CDLL) -> None:
    random = np.random.default_rng(9)
    bits = random.integers(0x00800000, 0x7F800000, 200_000, np.uint32)
    ends = np.array([0, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000, 0x7F7FFFFF], np.uint32)
    given = np.concatenate([ends, bits]).view(np.float32)
    found = np.zeros_like(given)
    call(library.square_roots, given, ctypes.c_uint32(given.size), found)
    np.testing.assert_array_equal(found, np.sqrt(given))


def test_training_decides_alike_outside_of_the_rounding() -> None:
    """The trainer's float32 score of `learned`: within 1e-5 of the exact one, so decisions agree beyond that."""
    torch.manual_seed(2)
    x, y, query = torch.randn(4, 3, 16, 256), torch.randn(4, 3, 16, 256), torch.randn(4, 3, 16, 2, 8)
    scorer = LearnedScorer(Sample(query, query, x, y), 16, torch.Generator().manual_seed(0))
    given = scorer.weights()
    w1 = exact_weights(given["w1"])
    half = (w1.float() * scorer._scale).chunk(2, 1)
    scorer.by_input.data, scorer.by_change.data = half[0].contiguous(), half[1].contiguous()
    now, before = x[:, 1:].flatten(0, 2), x[:, :-1].flatten(0, 2)
    with torch.no_grad():
        trained = scorer.score(scorer.prepare(query, query, now), now, before)
    found = fastcar.learned_score(now, before, w1, given["b1"], given["w2"], given["b2"])
    reach = 1e-5
    assert (trained - found).abs().max() < reach
    clear = found.abs() > reach
    assert clear.float().mean() > 0.99
    assert torch.equal((trained <= 0)[clear], (found <= 0)[clear])
