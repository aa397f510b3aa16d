"""Every recurrence of every loop, for every design that exploration may choose, and what the sources declare of it."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import budget_of, designs
from fastcar_compile.codegen.hls.design.loops import MEMORY_CLOCKS, total_latency
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.design.step_loops import TOTAL_INTERVAL
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.config.targets import available_targets, load_target
from hls import lint
from hls.library import design
from hls.test_lint import ENGINE_FILES

REGISTER_CLOCKS = 1
"""An integer addition, a comparison or a copy in registers."""


@dataclass(frozen=True)
class Recurrence:
    """What one loop carries on.

    Args:
        loop: function and label in the sources. variable: that the loop carries.
        distance: iterations after which a value is read again, at least.
        latency: clocks from that read to the write that the next read needs.
    """

    loop: str
    variable: str
    distance: int
    latency: int

    @property
    def keeps_pace(self) -> bool:
        """Whether the loop can start an iteration every clock."""
        return self.distance >= self.latency


def recurrences(design: Design) -> list[Recurrence]:
    """Return every recurrence of the engine's loops for every product of the design; index counters are left out."""
    clock, found = design.budget.clock_mhz, []
    for product in design.products:
        # A single sum per channel is scaled once and carries no total.
        if product.sums > 1:
            rows = max(product.tile, design.scale_rows)
            found.append(Recurrence("scale_tile.groups", "total", rows * product.port_blocks, total_latency(clock)))
    registers = [("mac_tile.words", "partial"), ("quantize_rows.sizes", "amax")]
    registers += [("finish_tile.channels", variable) for variable in ("lanes", "previous")]
    return found + [Recurrence(loop, variable, 1, REGISTER_CLOCKS) for loop, variable in registers]


def step_recurrences(design: Design) -> list[Recurrence]:
    """Return those that a kernel of whole steps has besides the array's."""
    total = -(-total_latency(design.budget.clock_mhz) // TOTAL_INTERVAL)  # iterations
    return [
        Recurrence("add_values.add_sums", "total", total, total),
        Recurrence("multiply_blocks.multiply_words", "partial", 1, REGISTER_CLOCKS),
        Recurrence("multiply_blocks.multiply_words", "input", 2, MEMORY_CLOCKS),
        Recurrence("soften.keep_logits", "found", 1, REGISTER_CLOCKS),
        Recurrence("soften.add_numerators", "sum", 1, REGISTER_CLOCKS),
        Recurrence("weigh_values.scale_weights", "largest", 1, REGISTER_CLOCKS),
        Recurrence("append_value.write_values", "now", 1, REGISTER_CLOCKS),
    ]


BOARDS = [name for name in available_targets() if load_target(name).kind == "fpga"]
SHAPES = {
    "7b": (4096, 11008, (("qkv", 4096, 12288), ("o", 4096, 4096), ("head", 4096, 32000))),
    "tinyllama": (2048, 5632, (("qkv", 2048, 2560), ("o", 2048, 2048), ("head", 2048, 32000))),
    "example": (128, 352, (("qkv", 128, 384), ("o", 128, 128), ("head", 128, 17))),
}
MADE = design(300, 11008, 2, 2, quant="w4a8")
"""Groups in both products; in the second, tiles of few rows."""


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_loop_of_every_design_keeps_its_interval(board: str, shape: str) -> None:
    hidden, intermediate, linears = SHAPES[shape]
    target, seen = load_target(board), 0
    for quant in ("w8a8", "w4a8"):
        for batch, cores in ((1, 1), (2, 2), (32, 8)):
            spec = MlpSpec(hidden, intermediate, batch=batch, layers=1, cores=cores, quant=quant)
            for made in designs(spec, budget_of(target), [LinearSpec(*linear) for linear in linears]):
                assert [r for r in recurrences(made) if not r.keeps_pace] == [], made
                seen += 1
    assert seen >= 48


def emitted(folder: Path) -> dict[str, str]:
    """The sources of `MADE`."""
    return {path.name: path.read_text() for path in emit_hls(MADE, folder)}


def findings(sources: dict[str, str]) -> list[str]:
    """What the sources declare, against the list."""
    return lint.find_slow_recurrences(
        [sources[name] for name in ENGINE_FILES],
        sources["fastcar_config.hpp"],
        [(r.loop, r.variable, r.distance, r.latency) for r in recurrences(MADE)],
    )


def test_the_sources_declare_the_distances_of_the_list(tmp_path: Path) -> None:
    assert MADE.down.tile * MADE.down.port_blocks == total_latency(250.0)
    assert findings(emitted(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong", "problem"),
    [
        ("fastcar_config.hpp", "SCALE_DISTANCE 8", "SCALE_DISTANCE 4", "total of scale_tile.groups: 4 iterations, 8"),
        ("fastcar_tile.hpp", "(partial, 1)", "(partial, 2)", "partial of mac_tile.words: 2 iterations, at least 1"),
        ("fastcar_tile.hpp", "(partial, 1)", "(product, 1)", "product of mac_tile.words is not listed"),
        ("fastcar_engine_core.hpp", "FASTCAR_RECURRENCE(amax, 1)", "", "amax of quantize_rows.sizes is not declared"),
    ],
)
def test_a_distance_that_is_too_short_is_found(tmp_path: Path, name: str, right: str, wrong: str, problem: str) -> None:
    sources = emitted(tmp_path)
    assert sources[name].count(right) == 1
    found = findings(sources | {name: sources[name].replace(right, wrong)})
    assert any(problem in text for text in found), found


def test_a_faster_clock_needs_a_longer_distance() -> None:
    """Above what is known of the adder, its longest form counts."""
    fast = replace(MADE, budget=replace(MADE.budget, clock_mhz=450.0))
    assert fast.scale_rows > MADE.scale_rows
    assert all(r.keeps_pace for r in recurrences(fast))
