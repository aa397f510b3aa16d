"""The decision in RTL, held to what the C++ controller is held to: operators, simulator, oracle, exact rationals."""

from pathlib import Path

import pytest
from drs.tables import LIMITS, Controller
from drs.test_decide import (
    test_a_layer_without_a_gate_computes_and_reads_no_operands,
    test_chain_counts_follow_the_limit,
    test_random_calls,
    test_thresholds,
)
from drs.test_input_gates import assert_decisions
from drs.test_tas import test_one_product_is_exact, test_scores_and_decisions_are_those_of_the_operators
from drs.unit import DrsUnit
from filelock import FileLock
from hls.library import DESIGNS

from rtl.simulation import Builder

__all__ = [
    "test_a_layer_without_a_gate_computes_and_reads_no_operands",
    "test_chain_counts_follow_the_limit",
    "test_one_product_is_exact",
    "test_random_calls",
    "test_scores_and_decisions_are_those_of_the_operators",
    "test_thresholds",
]

pytestmark = pytest.mark.thorough


@pytest.fixture
def controller(rtl_tools: None, builder: Builder) -> Controller:
    """A controller whose scores and decisions come from the RTL, built once."""
    path = builder.folder / "decide" / "fastcar_decide.bin"
    with FileLock(builder.folder / "lock"):
        if not path.is_file():
            options = (f"-GKEY_WORDS={LIMITS.key_words}", "-GWEIGHTED=1'b1")
            made, top = DESIGNS["linears"], Path("fastcar_decide.sv")
            builder.build(made, top, "decide.cpp", "decide", *options, limits=LIMITS)
    return Controller(DrsUnit(path))


def test_weights_of_chosen_heads(controller: Controller) -> None:
    """In one layer of two; the other one has the mean over all heads."""
    assert_decisions("tas", controller)
