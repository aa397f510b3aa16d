"""The kernel of whole steps in closed form: its resources, its program, and the laws of its time line."""

from dataclasses import replace
from typing import Any

import pytest

from fastcar_compile.artifact.engine import EngineProduct
from fastcar_compile.codegen.hls.design.exploration import explore
from fastcar_compile.codegen.hls.design.spec import StepSpec
from fastcar_compile.codegen.hls.design.step_usage import step_units
from fastcar_compile.codegen.hls.model import Estimate, Workload, estimate, load_shape
from fastcar_compile.codegen.hls.model.question import program_of_shape
from fastcar_compile.codegen.hls.model.step import without_replay
from fastcar_compile.codegen.hls.model.workload import GateModel
from fastcar_compile.codegen.hls.step_program import instructions as step
from fastcar_compile.codegen.hls.step_program.replaying import Decide, Replay
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import CompileError, InputError, UserError

TINY = load_shape("tinyllama-1.1b").model_copy(update={"layers": 3})
ZCU102 = load_target("zcu102")
LEFT = 0.15
"""Share of every resource of the device that a kernel leaves."""


def predict(shape: Any, quant: str, board: str, context: int = 512, **options: Any) -> Estimate:
    known = load_shape(shape) if isinstance(shape, str) else shape
    return estimate(Workload(known, quant, context, offload="all", **options), load_target(board), what_if=True)


@pytest.mark.parametrize("board", ["zcu102", "kv260"])
@pytest.mark.parametrize("shape", ["vila-u-7b", "llama2-7b", "llama3-8b"])
def test_the_kernel_fits_with_fifteen_per_cent_left(board: str, shape: str) -> None:
    result, fabric = predict(shape, "w4a8", board, 2048), load_target(board).fabric
    assert fabric is not None
    for name, part in result.resources.items():
        assert part["used"] <= part["limit"]
        assert part["used"] <= (1 - LEFT) * getattr(fabric, name)
    assert result.design["ports"] == 4


def test_replay_of_vila_u() -> None:
    assert predict("vila-u-7b", "w4a8", "zcu102", replay=0.8).speedup_over_dense >= 2.0
    assert predict("vila-u-7b", "w4a8", "zcu102").measured_utilisation >= 0.95


def test_rows_of_a_video_share_the_weight_stream() -> None:
    """Four positions of a prompt take little more than one; keys and slots are those of one video."""
    one, four = (predict("vila-u-7b", "w4a8", "zcu102", 128, batch=n, rows=n) for n in (1, 4))
    assert one.prefill_positions_per_second == pytest.approx(one.tokens_per_second)
    assert four.prefill_positions_per_second == pytest.approx(four.tokens_per_second)
    assert 3.5 < four.tokens_per_second / one.tokens_per_second < 4
    assert four.memory == one.memory
    assert predict("vila-u-7b", "w4a8", "zcu102", 128, batch=4).memory["kv_cache"] == 4 * one.memory["kv_cache"]
    with pytest.raises(InputError, match=r"batch = 4 with rows = 3 \(a multiple\)"):
        predict("vila-u-7b", "w4a8", "zcu102", batch=4, rows=3)


@pytest.mark.parametrize(
    ("shape", "rows", "least"),
    [("vila-u-7b", 1, 5.0), ("vila-u-7b", 2, 9.1), ("vila-u-7b", 4, 16.0), ("llama3-8b", 1, 4.5)],
)
def test_what_fits_kv260_is_as_fast_as_its_memory(shape: str, rows: int, least: float) -> None:
    """Rows have cores of their own, and four ports: none is refused for block RAM or LUTs."""
    found = predict(shape, "w4a8", "kv260", 512, batch=rows, rows=rows)
    assert (found.design["ports"], found.design["spec"]["cores"]) == (4, rows)
    assert found.tokens_per_second >= least


def test_what_does_not_fit_is_refused_by_resource() -> None:
    work = Workload(load_shape("vila-u-7b"), "w4a8", 512, 32, "all")
    with pytest.raises(CompileError, match=r"a kernel of whole steps .* 32 row\(s\) .* URAM \d+ of 51") as caught:
        explore(work.kernel_spec(), load_target("kv260"))
    assert "offload='linears'" in str(caught.value)


def test_the_program_is_what_the_compiler_builds() -> None:
    work = Workload(TINY, "w4a8", 64, 2, "all", gate=GateModel.named("learned"))
    program = program_of_shape(work, explore(work.kernel_spec(), ZCU102).design)
    kinds = [type(i) for i in program.instructions]
    assert kinds.count(Decide) == kinds.count(Replay) == TINY.layers
    dense = without_replay(program)
    found = [type(i) for i in dense.instructions]
    assert Decide not in found
    assert Replay not in found
    assert found.count(step.Add) == 2 * TINY.layers
    headless = replace(work, shape=TINY.model_copy(update={"vocab": 0}))
    bare = program_of_shape(headless, explore(headless.kernel_spec(), ZCU102).design)
    assert [type(i) for i in bare.instructions] == [*kinds[:-2], step.Store, step.End]


def test_a_draft_takes_its_weights_where_a_row_replays() -> None:
    """Of the mean step of one row; and a second core for the recalled row, and units of its own."""
    plain = Workload(TINY, "w8a8", 128, offload="all", replay=0.5, gate=GateModel.named("learned"))
    work = plain.with_drafts(0.2)
    without, found = (estimate(own, ZCU102) for own in (plain, work))
    parts = (own[name] for own in found.design["drafts"].values() for name in ("first", "outer"))
    moved = sum(EngineProduct(**part).port_words for part in parts) * found.design["ports"] * 16
    # Beside the weights: x and the bias of a row, and the table of the gain.
    assert found.bytes_per_step - without.bytes_per_step == pytest.approx(0.5 * moved, rel=0.05)
    assert moved == pytest.approx(found.draft["bytes"], rel=0.03)
    assert (found.draft["layers"], found.draft["share"]) == (TINY.layers, pytest.approx(0.2, abs=0.01))
    assert without.draft == {}
    assert found.comparison["dense"] == pytest.approx(without.comparison["dense"], rel=0.01)
    assert without.tokens_per_second > found.tokens_per_second > found.comparison["dense"]
    assert (found.design["spec"]["cores"], without.design["spec"]["cores"]) == (2, 1)
    units = step_units(explore(work.kernel_spec(), ZCU102).design, StepSpec(4, 4, 64, 128).buffers(work.mlp_spec(), 1))
    assert units["draft"].lut > 0
    extra = found.macs_per_step - without.macs_per_step
    linears = [TINY.draft_linears(own) for own in work.drafts if own is not None]
    assert extra == pytest.approx(0.5 * sum(2 * x.macs + y.macs for x, y in linears))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload": "linears"}, 'drafts with offload = "linears"'),
        ({"gate": GateModel()}, "drafts with gate tas"),
        ({"batch": 17}, "17 rows are more than 16"),
    ],
)
def test_drafts_that_no_kernel_has(options: dict[str, Any], text: str) -> None:
    work = Workload(TINY, "w8a8", 128, offload="all", replay=0.5, gate=GateModel.named("learned")).with_drafts(0.2)
    with pytest.raises(UserError, match=text):
        estimate(replace(work, **options), ZCU102)


def test_a_step_is_one_launch() -> None:
    result = predict(TINY, "w8a8", "zcu102", replay=0.5)
    units = [s["unit"] for s in result.time_line]
    assert units.count("launch") == 1
    assert {s["name"] for s in result.time_line if s["unit"] == "host"} == {"embed", "sample"}
    assert {"attend", "vector", "memory", "launch", "host"} <= set(result.shares)
    assert result.prefill_positions_per_second == pytest.approx(1 / (1 / result.comparison["dense"]))
    assert predict(TINY.model_copy(update={"vocab": 0}), "w8a8", "zcu102").shares.keys() & {"host"} == {"host"}
    linears = estimate(Workload(TINY, "w8a8", 512), ZCU102)
    assert linears.prefill_positions_per_second is None


def test_bytes_are_weights_keys_values_and_rows() -> None:
    short, long = (predict(TINY, "w8a8", "zcu102", context) for context in (512, 1024))
    assert long.bytes_per_step - short.bytes_per_step == pytest.approx(TINY.kv_bytes(512, 1, 8, 32), rel=0.01)
    assert short.measured_utilisation < 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv": "float16"}, 'kv = "float16" with offload = "all"'),
        ({"replay": 0.5, "gate": GateModel("mine", on_host=True)}, "gate mine with offload"),
    ],
)
def test_refused_workloads(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        predict(TINY, "w8a8", "zcu102", **options)
