"""The gates' operators: TVM and ONNX against the eager definitions, those against plain formulas."""

import re
from pathlib import Path

import pytest
import torch
import tvm
from conftest import first_often
from lowering.kernel_runs import run
from onnx_export.test_ops import run_onnx
from torch import Tensor

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet
from fastcar_compile.codegen.tvm.kernels import gate as scores
from fastcar_compile.codegen.tvm.kernels.gate import GateRules, gate
from fastcar_compile.codegen.tvm.target import host_target

from .cases import CASES as NETWORKS

fastcar = torch.ops.fastcar
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
    scores, limit = [0.5, 0.7, 0.4, -1.0], 0.5
    chain = torch.randint(0, 3, (6, 4), dtype=torch.int32)
    passes = [(s <= limit if at_most else s >= limit) and step >= 6 for s in scores]
    passes = [p and not (refresh and step // 6 % refresh == 0) for p in passes]
    passes = [p and (max_chain < 0 or int(c) < max_chain) for p, c in zip(passes, chain[step % 6], strict=True)]
    if couple:
        passes = [passes[b % 2] and passes[b % 2 + 2] for b in range(4)]
    tensors = (torch.tensor(scores), torch.tensor([limit]), torch.tensor([step]), chain)
    options = (6, max_chain, couple, refresh, at_most)
    assert fastcar.gate(*tensors, *options).tolist() == passes
    kernel = gate(4, 6, GateRules(*options))
    assert run(kernel, chain, *tensors[:3], torch.zeros(4, dtype=torch.bool))[-1].tolist() == passes
    assert run_onnx(fastcar.gate.default, tensors, options, tmp_path / "op.onnx").tolist() == passes


@pytest.mark.parametrize("isa", first_often(INSTRUCTION_SETS), ids=lambda isa: isa.name)
def test_learned_score_on_every_instruction_set(isa: InstructionSet) -> None:
    """Compiled for each without a call of the C library. test_exact_scores.py and board/ run it."""
    kernels = tvm.IRModule({case.name: case.kernel(isa) for case in NETWORKS})
    built = tvm.compile(kernels, target=host_target(isa))
    assembler = built.mod.inspect_source("asm")
    calls = re.findall(r"\b(?:callq?|bl)\s+(\w+)", assembler)
    assert not [name for name in calls if name.startswith(("__trunc", "__ext", "fabs", "fma"))]
