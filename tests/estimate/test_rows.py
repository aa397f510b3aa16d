"""Rows, cores and passes: DRS and the static mapping on the same decisions, counted and drawn."""

from dataclasses import replace

import numpy as np
import pytest
from drs.oracle import places
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.model import Workload, load_shape
from fastcar_compile.codegen.hls.model.question import Draw, Mapping, ask, core_rows, coupled, draw_decisions, passes_of
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import InputError


@given(register=st.integers(0, 2**32 - 1), rows=st.integers(1, 32), cores=st.integers(1, 8))
def test_rows_of_a_core_are_those_of_the_mapping_registers(register: int, rows: int, cores: int) -> None:
    computing = np.array([bool(register >> row & 1) for row in range(rows)])
    mapped = [place for place in places(computing.tolist(), cores) if place is not None]
    counted = [sum(place[0] == core for place in mapped) for core in range(cores)]
    assert core_rows(computing, cores, Mapping.DRS).tolist() == counted
    passes = max((place[1] + 1 for place in mapped), default=0)
    assert passes_of(~computing[None, None], cores, Mapping.DRS).item() == passes
    static = [computing[core::cores].sum() for core in range(cores)]
    assert core_rows(computing, cores, Mapping.STATIC).tolist() == static


@pytest.mark.parametrize(("rows", "cores", "gain"), [(16, 4, 1.39), (32, 8, 1.70), (4, 4, 1.0)])
def test_monte_carlo_of_independent_rows(rows: int, cores: int, gain: float) -> None:
    """Busiest core, static over DRS, at replay 0.8. With a core per row there is nothing to balance."""
    decisions = np.random.default_rng(7).random((50_000, 1, rows)) < 0.8
    means = [passes_of(decisions, cores, mapping).mean() for mapping in (Mapping.STATIC, Mapping.DRS)]
    assert means[0] / means[1] == pytest.approx(gain, abs=0.02)


def test_rows_that_decide_alike_leave_nothing_to_balance() -> None:
    decisions = draw_decisions((200, 3, 16), 0.8, Draw.CORRELATED)
    assert (decisions == decisions[..., :1]).all()
    assert decisions.mean() == pytest.approx(0.8)
    assert (passes_of(decisions, 4, Mapping.STATIC) == passes_of(decisions, 4, Mapping.DRS)).all()


def test_guidance_pairs_share_their_decisions() -> None:
    drawn = draw_decisions((200, 3, 16), 0.8, Draw.PAIRS)
    assert (drawn[..., :8] == drawn[..., 8:]).all()
    assert (drawn[..., 0] != drawn[..., 1]).any()
    assert (drawn.mean(0) == 0.8).all()
    # Row b + 8 is on the core of row b under the static mapping, so a pair that computes takes it twice.
    assert passes_of(drawn, 4, Mapping.STATIC).mean() > 1.3 * passes_of(drawn, 4, Mapping.DRS).mean()
    alone = draw_decisions((200, 3, 16), 0.8)
    both = coupled(alone)
    assert (both == coupled(both)).all()
    assert (both[..., 3] == alone[..., 3] & alone[..., 11]).all()
    for wrong in (lambda: draw_decisions((4, 1, 3), 0.5, Draw.PAIRS), lambda: coupled(alone[..., :3])):
        with pytest.raises(InputError, match=r"3 row\(s\) are no guidance pairs"):
            wrong()


def test_a_workload_of_pairs_draws_them() -> None:
    shape = load_shape("tinyllama-1.1b").model_copy(update={"layers": 2})
    work, board = Workload(shape, "w8a8", 8, 16, replay=0.5, couple_cfg=True), load_target("zcu102")
    question = ask(work, board)
    assert (coupled(question.decisions) == question.decisions).all()
    assert work.control_table(4).couple_cfg
    alone = np.zeros((1, 2, 16), bool)
    alone[..., 0] = True
    with pytest.raises(InputError, match="not those of guidance pairs"):
        ask(work, board, decisions=alone)
    with pytest.raises(InputError, match="guidance pairs of batch = 3"):
        ask(replace(work, batch=3), board)


def test_a_draw_meets_its_ratio_per_layer_and_row_and_depends_on_the_seed() -> None:
    decisions = draw_decisions((200, 3, 4), 0.35, seed=1)
    assert (decisions.mean(0) == 0.35).all()
    assert (decisions == draw_decisions((200, 3, 4), 0.35, seed=1)).all()
    assert (decisions != draw_decisions((200, 3, 4), 0.35, seed=2)).any()
    with pytest.raises(InputError, match="there are no 0 cores"):
        passes_of(decisions, 0, Mapping.DRS)
