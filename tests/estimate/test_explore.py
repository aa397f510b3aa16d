"""Design-space exploration: the best design that fits, nothing beyond the board, and why it is no faster."""

from __future__ import annotations

import pytest

from fastcar_compile.codegen.hls.design import MlpDesign, excess
from fastcar_compile.errors import CompileError, TargetError
from fastcar_compile.estimate import explore as module
from fastcar_compile.estimate.explore import budget_of, explore, resources_of
from fastcar_compile.estimate.shapes import load_shape
from fastcar_compile.targets import Target, available_targets, load_target

BOARDS = [name for name in available_targets() if name != "cpu"]


def small_board(**fabric: int) -> Target:
    """zcu104 with other counts."""
    board = load_target("zcu104")
    assert board.fabric is not None
    return board.model_copy(update={"fabric": board.fabric.model_copy(update=fabric)})


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize(("shape", "batch"), [("vila-u-7b", 1), ("tinyllama-1.1b", 2)])
def test_no_design_exceeds_its_target(board: str, shape: str, batch: int) -> None:
    target = load_target(board)
    design = explore(load_shape(shape), "w8a8", batch, target).design
    for name, row in resources_of(design, target).items():
        assert row["used"] <= row["limit"], name


def test_a_smaller_board_gets_a_smaller_design_and_says_what_it_lacks() -> None:
    shape = load_shape("tinyllama-1.1b")
    large = explore(shape, "w8a8", 8, load_target("zcu104"))
    small = explore(shape, "w8a8", 8, small_board(dsp=400))
    assert small.design.usage.dsp < large.design.usage.dsp
    assert small.seconds_per_layer > large.seconds_per_layer
    assert small.rejected > 0
    assert small.bound_by == "DSP"
    assert small.faster[0].startswith("DSP ")


def test_it_is_the_least_of_all_that_fit() -> None:
    shape, target = load_shape("tinyllama-1.1b"), small_board(dsp=400)
    found = explore(shape, "w8a8", 8, target)
    candidates = list(module._candidates(shape, "w8a8", 8, budget_of(target)))
    times = [module._seconds(d, shape, "w8a8", target)[0] for d in candidates if not excess(d)]
    assert found.seconds_per_layer == min(times)
    assert found.tried == len(candidates) > 20


def test_nothing_fits() -> None:
    with pytest.raises(CompileError, match=r"does not fit xczu7ev-ffvc1156-2-e: .*BRAM36 \d+ of 8"):
        explore(load_shape("vila-u-7b"), "w8a8", 1, small_board(bram36=10))


def test_a_cpu_has_no_fabric() -> None:
    with pytest.raises(TargetError, match="cpu has no fabric to place an engine on"):
        explore(load_shape("vila-u-7b"), "w8a8", 1, load_target("cpu"))


def test_a_design_comes_back_from_the_manifest() -> None:
    design = explore(load_shape("tinyllama-1.1b"), "w8a8", 2, load_target("zcu102")).design
    assert MlpDesign.from_json(design.to_json()) == design
