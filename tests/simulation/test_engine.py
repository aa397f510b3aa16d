"""The cycle model of the emitted engine, and the closed form beside it: one loop table, within 5 % of each other."""

from itertools import product
from random import Random

import pytest
from conftest import first_often
from cycle_model.engine import simulated

from fastcar_compile.codegen.hls.model import DecoderShape, Workload, load_shape
from fastcar_compile.codegen.hls.model.question import ask, draw_decisions
from fastcar_compile.codegen.hls.model.system import SystemRun
from fastcar_compile.config.targets import load_target

EXAMPLE = DecoderShape(
    name="moving-shapes", layers=4, hidden=128, intermediate=352, heads=4, kv_heads=4, head_dim=32, vocab=17,
    source="examples/moving_shapes",
)  # fmt: skip
TINY = load_shape("tinyllama-1.1b").model_copy(update={"layers": 2, "vocab": 0})
LARGE = load_shape("vila-u-7b").model_copy(update={"layers": 1})
BOARDS = ("zcu102", "kv260", "zcu104", "u280")
POINTS = Random(17).sample(list(product(BOARDS, (EXAMPLE, TINY), ("w8a8", "w4a8"), (1, 4), (0.0, 0.5, 0.8))), 8)
WIDE = Random(18).sample(list(product(("zcu102", "u280"), (EXAMPLE,), ("w8a8", "w4a8"), (32,), (0.0, 0.5, 0.8))), 3)
SEVEN_BILLION = [("zcu102", LARGE, "w4a8", 1, 0.0), ("kv260", LARGE, "w8a8", 1, 0.0), ("u280", LARGE, "w4a8", 1, 0.5)]


@pytest.mark.parametrize(
    ("board", "shape", "quant", "batch", "replay"),
    first_often([WIDE[0], SEVEN_BILLION[1], *POINTS, *WIDE[1:], SEVEN_BILLION[0], SEVEN_BILLION[2]], 7),
    ids=lambda value: value.name if isinstance(value, DecoderShape) else str(value),
)
def test_the_closed_form_is_within_five_per_cent(
    board: str, shape: DecoderShape, quant: str, batch: int, replay: float
) -> None:
    work = Workload(shape, quant, 64, batch, replay=replay)
    decisions = draw_decisions((4, shape.layers, batch), replay)
    question = ask(work, load_target(board), decisions=decisions, recorded=False, what_if=True)
    runs = SystemRun.of(question.board(), question.decisions, question.attended), simulated(question)[0]
    closed, cycles = (run.streaming + run.busy.get("drs", 0.0) for run in runs)
    assert closed == pytest.approx(cycles, rel=0.05)
