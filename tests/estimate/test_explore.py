"""Design-space exploration: the best design that fits, nothing beyond the board, and why it is no faster."""

import re
from pathlib import Path

import pytest

from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.codegen.hls.control_table.table import Limits
from fastcar_compile.codegen.hls.design import exploration as module
from fastcar_compile.codegen.hls.design.controller import controller_usage
from fastcar_compile.codegen.hls.design.exploration import Exploration, KernelSpec, explore, resources_of
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.model import Workload, load_shape
from fastcar_compile.codegen.hls.model.workload import GateModel
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.config.targets import Fabric, Target, available_targets, load_target
from fastcar_compile.errors import CompileError

BOARDS = [name for name in available_targets() if load_target(name).kind == "fpga"]


def small_board(**fabric: int) -> Target:
    """zcu104 with other counts."""
    board = load_target("zcu104")
    assert board.fabric is not None
    return board.model_copy(update={"fabric": board.fabric.model_copy(update=fabric)})


def no_uram(board: str) -> Fabric | None:
    """A board's fabric without URAM."""
    fabric = load_target(board).fabric
    return fabric and fabric.model_copy(update={"uram": 0})


def explored(shape: str, quant: str, batch: int, target: Target, offload: str = "mlp") -> Exploration:
    """The best engine for a shape."""
    work = Workload(load_shape(shape), quant, 1, batch, offload)  # pyright: ignore[reportArgumentType]
    return explore(work.kernel_spec(), target)


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize(("shape", "batch"), [("vila-u-7b", 1), ("tinyllama-1.1b", 2)])
def test_no_design_exceeds_its_target(board: str, shape: str, batch: int) -> None:
    target = load_target(board)
    design = explored(shape, "w4a8", batch, target, "linears").design
    wanted = Workload(load_shape(shape), "w4a8", 1).kernel_spec()
    for name, row in resources_of(design, wanted, target).items():
        assert row["used"] <= row["limit"], name


def test_room_is_left_for_the_unit_of_the_chosen_gate() -> None:
    """A network keeps its features and units on chip, and multiplies by bfloat16 weights."""
    tas, learned = (
        Workload(load_shape("tinyllama-1.1b"), "w4a8", 1, gate=GateModel.named(name)) for name in ("tas", "learned")
    )
    target = load_target("zcu102")
    used = [controller_usage(w.kernel_spec().controller) for w in (tas, learned)]
    assert used[0].bram36 < used[1].bram36
    found = [resources_of(explore(w.kernel_spec(), target).design, w.kernel_spec(), target) for w in (tas, learned)]
    assert found[1]["dsp"]["used"] - found[0]["dsp"]["used"] == used[1].dsp - used[0].dsp != 0


def test_a_smaller_board_gets_a_smaller_design_and_says_what_it_lacks() -> None:
    large = explored("tinyllama-1.1b", "w8a8", 8, load_target("zcu104"))
    small = explored("tinyllama-1.1b", "w8a8", 8, small_board(dsp=400))
    assert small.design.usage.dsp < large.design.usage.dsp
    assert small.seconds_per_step > large.seconds_per_step
    assert small.rejected > 0
    assert small.bound_by == small.faster[0].split()[0]
    assert any(text.startswith("DSP ") for text in small.faster)
    assert re.search(
        r"8 row\(s\) on 3 core\(s\) .* take 124 ms a step; .* for DSP \d+ of 308, takes 44 ms\.", small.slow
    )
    assert large.slow == ""


@pytest.mark.parametrize("quant", ["w8a8", "w4a8"])
def test_a_large_batch_keeps_the_weight_ports_of_one_row(quant: str) -> None:
    """The rows of a core follow each other over a tile that stays: a wider batch costs no port."""
    target = load_target("zcu102")
    alone, wide = (explored("vila-u-7b", quant, batch, target, "linears").design for batch in (1, 32))
    assert wide.ports == alone.ports == 4
    assert wide.mlp.cores >= 8


@pytest.mark.parametrize("batch", [4, 8, 32])
def test_a_small_decoder_gets_a_core_per_row_up_to_the_most(batch: int) -> None:
    """What rows cost outside of the tiles does not count against cores."""
    spec = MlpSpec(hidden=128, intermediate=352, batch=batch, layers=4, cores=1)
    linears = [LinearSpec("qkv", 128, 384), LinearSpec("o", 128, 128)]
    wanted = KernelSpec(spec, Limits(table_words=64, query_words=32, key_words=32), linears)
    made = explore(wanted, load_target("zcu102")).design
    assert (made.ports, made.mlp.cores) == (4, min(batch, module.MAX_CORES))


def test_fewer_ports_when_nothing_fits_beside_them() -> None:
    """Rows of sixteen tokens fill most of this board's memories."""
    target = load_target("kv260")
    alone, wide = (explored("vila-u-7b", "w4a8", batch, target).design for batch in (1, 16))
    assert wide.ports < alone.ports


def test_nothing_fits() -> None:
    with pytest.raises(CompileError, match=r"does not fit xczu7ev-ffvc1156-2-e: .*BRAM36 \d+ of \d"):
        explored("vila-u-7b", "w8a8", 1, small_board(bram36=12))
    with pytest.raises(CompileError, match=r"(?s)and linears of up to 4096 inputs.*BRAM36 \d+ of \d.*or offload='mlp'"):
        explored("vila-u-7b", "w8a8", 1, small_board(bram36=12), "linears")


def test_tiles_are_in_ultraram_where_that_is_faster(tmp_path: Path) -> None:
    """Without its URAM, two cores on a KV260 would have short w4a8 tiles, whose groups would wait for the adders."""
    found = explored("llama2-7b", "w4a8", 2, load_target("kv260"))
    without = explored("llama2-7b", "w4a8", 2, load_target("kv260").model_copy(update={"fabric": no_uram("kv260")}))
    assert found.design.tiles_in_uram
    assert found.design.usage.uram > 0
    assert not without.design.tiles_in_uram
    assert without.seconds_per_step > found.seconds_per_step
    for design, defined in ((found.design, True), (without.design, False)):
        emit_hls(design, tmp_path)
        text = (tmp_path / "fastcar_config.hpp").read_text()
        assert text.split("#include")[0].count("#define FASTCAR_TILES_IN_URAM") == defined
