"""Clocks of linears, MLPs and decisions in RTL against the closed form of `estimate`."""

from pathlib import Path

import pytest
from conftest import imported

from rtl.simulation import Builder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLOSE = 0.03


@pytest.mark.thorough
@pytest.mark.parametrize("place", range(7))
def test_the_closed_form_is_close(rtl_tools: None, builder: Builder, place: int) -> None:
    with imported([BENCHMARKS], ["rtl_cycles"]) as scripts:
        assert len(scripts.rtl_cycles.CASES) == 7
        for row in scripts.rtl_cycles.measure(scripts.rtl_cycles.CASES[place], builder):
            assert row.rtl == pytest.approx(row.model, rel=CLOSE), row.text


@pytest.mark.thorough
def test_a_token_takes_the_clocks_of_the_closed_form(rtl_tools: None, builder: Builder) -> None:
    """All its linears and MLPs."""
    with imported([BENCHMARKS], ["rtl_cycles"]) as scripts:
        (row,) = scripts.rtl_cycles.token(builder)
        assert row.rtl == pytest.approx(row.model, rel=CLOSE), row.text


@pytest.mark.thorough
def test_a_decision_takes_the_clocks_of_the_closed_form(rtl_tools: None, builder: Builder) -> None:
    with imported([BENCHMARKS], ["rtl_cycles"]) as scripts:
        for decision in scripts.rtl_cycles.DECISIONS:
            for row in scripts.rtl_cycles.decide(*decision, builder):
                assert row.rtl == pytest.approx(row.model, rel=CLOSE), row.text
