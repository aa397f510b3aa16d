"""The whole decode step and prefill chunk against the eager graph, and what must not happen in it."""

import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from agreement import thresholds_between
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline

from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime.backends.base import Stepper

from .programs import FRAME, LAYERS, Case, cpu_backend, eager_backend, export, lowered, program, tokens

STEPS = 3 * FRAME + 5
CASES = [Case(max_chain=1, couple_cfg=True, quant="w8a8"), Case(quant="w4a8", bias=True)]
INF = float("inf")


@pytest.fixture(scope="module", params=[pytest.param(CASES[0], marks=pytest.mark.thorough), CASES[1]], ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Stepper, Stepper]:
    folder = tmp_path_factory.mktemp("libraries")
    case = request.param
    return case, eager_backend(case), cpu_backend(case, export(case, folder, "decode"))


def _median_scores(case: Case, eager: Stepper) -> np.ndarray:
    """Thresholds between the scores of the dense decoder."""
    eager.reset()
    never = np.full(LAYERS, INF, np.float32)
    return thresholds_between(
        np.stack([eager.decode(t, i, i, never).scores for i, t in enumerate(tokens(case, STEPS))])
    )


def test_decode_equals_eager(built: tuple[Case, Stepper, Stepper]) -> None:
    case, eager, cpu = built
    limits = _median_scores(case, eager)
    eager.reset()
    cpu.reset()
    decided = []
    for i, token in enumerate(tokens(case, STEPS)):
        expected, actual = eager.decode(token, i, i, limits), cpu.decode(token, i, i, limits)
        np.testing.assert_array_equal(actual.decisions, expected.decisions, err_msg=f"step {i}")
        np.testing.assert_allclose(actual.scores, expected.scores, atol=_tolerance(case), err_msg=f"step {i}")
        np.testing.assert_allclose(actual.logits, expected.logits, atol=_tolerance(case), err_msg=f"step {i}")
        decided.append(actual.decisions)
    assert 0 < np.mean(decided) < 1


def _tolerance(case: Case) -> float:
    """A last-bit difference of attention can move an activation by one int8 step."""
    return {"w8a8": 5e-2, "w4a8": 1e-1}[case.quant]


def test_no_cache_is_copied() -> None:
    """No planned buffer is as large as a cache."""
    case = CASES[1]
    planned = [int(n) for n in re.findall(r"R\.shape\(\[(\d+)\]\)", planned_script(case))]
    caches = [s.nbytes for s in program(case).state if s.role is StateRole.KEY_CACHE]
    assert planned
    assert max(planned) < min(caches)


def planned_script(case: Case) -> str:
    """The Relax module after memory planning, where every storage has its size in bytes."""
    target = host_target()
    with target:
        module = tvm.transform.Sequential([*library_and_dataflow(target), relax.transform.StaticPlanBlockMemory()])(
            lowered(case).ir_module
        )
    functions = [f for f in module.functions.values() if isinstance(f, relax.Function)]
    return "\n".join(line for f in functions for line in f.script().splitlines() if "alloc_storage" in line)


def library_and_dataflow(target: tvm.target.Target) -> list[tvm.transform.Pass]:
    """TVM's CPU passes up to memory planning."""
    passes = [*pipeline.legalize_passes(target), *pipeline.dataflow_lower_passes(target)]
    return [relax.transform.ConvertToDataflow(), *passes]


def many(layers: int) -> Case:
    """The last layer never replays."""
    return Case(thresholds=(0.0,) * (layers - 1) + (None,))


@pytest.mark.parametrize("layers", [11, pytest.param(26, marks=pytest.mark.thorough)])
def test_every_layer_has_its_own_threshold_and_decision(layers: int, tmp_path: Path) -> None:
    """More layers than one kernel takes, one of which never replays; a prime number of them and others."""
    case = many(layers)
    eager, cpu = eager_backend(case), cpu_backend(case, export(case, tmp_path, "decode"))
    random = np.random.default_rng(layers)
    seen = np.zeros((layers, 2), bool)
    for i, token in enumerate(tokens(case, 2 * FRAME)):
        limits = np.where(random.random(layers) < 0.5, -INF, INF).astype(np.float32)
        expected, actual = (backend.decode(token, i, i, limits) for backend in (eager, cpu))
        np.testing.assert_array_equal(actual.decisions, expected.decisions)
        np.testing.assert_allclose(actual.scores, expected.scores, atol=1e-4)
        seen |= actual.decisions
    np.testing.assert_array_equal(seen.all(axis=1), np.arange(layers) < layers - 1)
