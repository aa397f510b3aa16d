"""`fastcar verify`."""

import functools
import json
import math

import numpy as np
import pytest

from fastcar_compile.cli.verify import Trace, compare

from .conftest import FRAME, FakeArtifact, FakeSession, Fastcar


@pytest.mark.usefixtures("fake")
def test_all_equal(fastcar: Fastcar) -> None:
    result = fastcar("verify", "x")
    assert result.exit_code == 0
    assert f"{2 * FRAME} steps of 2 rows against eager" in result.stdout
    assert result.stdout.count(" ok") == 2
    data = json.loads(fastcar("verify", "x", "--json", "--tokens", "10").stdout)
    assert (data["ok"], data["steps"], data["rows"]) == (True, 10, 2)
    assert [item["backend"] for item in data["results"]] == ["cpu", "onnxruntime"]
    assert data["results"][0]["first_mismatch"] is None


@pytest.mark.parametrize(
    ("error", "flip", "step", "decisions"), [(0.01, False, 5, 0), (0.0, True, 6, 1), (math.nan, False, 5, 0)]
)
def test_mismatch_is_exit_code_1(
    fastcar: Fastcar, fake: FakeArtifact, error: float, flip: bool, step: int, decisions: int
) -> None:
    fake.make["onnxruntime"] = functools.partial(FakeSession, error, flip)
    result = fastcar("verify", "x", "--json")
    data = json.loads(result.stdout)
    good, bad = data["results"]
    assert (result.exit_code, data["ok"], good["ok"], bad["ok"]) == (1, False, True, False)
    assert (bad["first_mismatch"], bad["decision_mismatches"]) == (step, decisions)
    expected = "inf" if math.isnan(error) else pytest.approx(error, abs=1e-6)
    assert bad["max_abs_error"] == expected
    text = fastcar("verify", "x").stdout
    assert "MISMATCH" in text
    assert f"step {step}" in text


def test_rounding_is_measured_where_a_quantised_backend_differs(fastcar: Fastcar, fake: FakeArtifact) -> None:
    fake.options |= {"quant": "w8a8"}
    fake.make |= {name: functools.partial(FakeSession, e) for name, e in (("cpu", 0.15), ("perturbed", 0.1))}
    data = json.loads(fastcar("verify", "x", "--json").stdout)
    assert (data["ok"], data["tolerance"], data["rounding"]) == (True, 0.05, pytest.approx(0.1))
    assert "moved in the last place differs by 0.1: 0.2 is allowed" in fastcar("verify", "x").stdout
    fake.make["cpu"] = functools.partial(FakeSession, 0.25)
    assert fastcar("verify", "x").exit_code == 1
    fake.make["cpu"] = functools.partial(FakeSession, 0.15)
    assert fastcar("verify", "x", "--tolerance", "0.05").exit_code == 1


def test_rounding_counts_until_a_decision_differs(fastcar: Fastcar, fake: FakeArtifact) -> None:
    """A replay more or less is no rounding: the error of step 7 comes after the flip of step 6."""
    fake.options |= {"quant": "w8a8"}
    fake.make |= {
        "cpu": functools.partial(FakeSession, 0.15),
        "perturbed": functools.partial(FakeSession, 9.0, True, 7),
    }
    assert json.loads(fastcar("verify", "x", "--json").stdout)["rounding"] == 0.0


def test_threshold_goes_to_every_session(fastcar: Fastcar, fake: FakeArtifact) -> None:
    fastcar("verify", "x", "--threshold=-inf")
    assert [session.thresholds for session in fake.sessions] == [-math.inf] * 3


def test_a_token_that_both_forbid_is_no_difference() -> None:
    logits = np.array([[[0.0, -np.inf, 2.0]], [[1.0, 2.0, -np.inf]]], np.float32)
    decisions = np.zeros((1, 1, 1), np.bool_)
    one, same, other = (Trace(values, decisions, 0.0) for values in (logits, logits + 0.25, np.abs(logits)))
    assert compare("cpu", one, same, 0.5).max_abs_error == 0.25
    assert compare("cpu", one, other, 0.5).max_abs_error == np.inf
