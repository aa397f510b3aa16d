"""Clocks of linears, MLPs and decisions in RTL against the closed form of `estimate`."""

from pathlib import Path

import pytest
from conftest import imported

from fastcar_compile.codegen.hls.design.loops import ACTIVATION_DEPTH
from rtl.simulation import Builder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLOSE = 0.03


@pytest.mark.thorough
@pytest.mark.parametrize("place", range(7))
def test_the_closed_form_is_close(rtl_tools: None, builder: Builder, place: int) -> None:
    """But for the activation, whose stages the loop of the C++ has for a linear too."""
    with imported([BENCHMARKS], ["rtl_cycles"]) as scripts:
        assert len(scripts.rtl_cycles.CASES) == 7
        for row in scripts.rtl_cycles.measure(scripts.rtl_cycles.CASES[place], builder):
            assert row.rtl == pytest.approx(row.model, rel=CLOSE, abs=ACTIVATION_DEPTH + CLOSE * row.model), row.text


@pytest.mark.thorough
def test_a_token_takes_the_clocks_of_the_closed_form(rtl_tools: None, builder: Builder) -> None:
    """All its linears and MLPs: the activation's stages of every linear are missing."""
    with imported([BENCHMARKS], ["rtl_cycles"]) as scripts:
        (row,) = scripts.rtl_cycles.token(builder)
        assert row.rtl == pytest.approx(row.model, rel=CLOSE), row.text


@pytest.mark.thorough
def test_a_decision_takes_the_clocks_of_the_closed_form(rtl_tools: None, builder: Builder) -> None:
    with imported([BENCHMARKS], ["rtl_cycles"]) as scripts:
        for decision in scripts.rtl_cycles.DECISIONS:
            for row in scripts.rtl_cycles.decide(*decision, builder):
                assert row.rtl == pytest.approx(row.model, rel=CLOSE), row.text
