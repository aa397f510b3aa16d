"""Faults in the emitted headers, one at a time: each compiles, and the test bench of the kernel finds each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from conftest import Precompiled
from hls.library import DESIGNS
from hls.test_project import fast_build, run

from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.project import emit_hls
from step.test_step import DECODERS


@dataclass(frozen=True)
class Mutant:
    """A header with `wrong` where `right` stands once.

    Args:
        design: name of a decoder of whole steps, or of a design of short programs.
    """

    name: str
    header: str
    right: str
    wrong: str
    design: str = "tas, normed"


LEARNED, INT8, THREE = "learned", "tas", "input_delta, 3 of 1"

FIRST = [
    Mutant("rounding", "numerics", "rest > 0.5f", "rest > 0.75f", "linears_int4"),
]

OTHERS = [
    Mutant("threshold", "tas_core", "scores[row] >= threshold", "scores[row] > threshold"),
    Mutant("entry", "step_control", ".opcode == OP_END);", ".opcode == OP_MLP);", "linears_int4"),
    # The array.
    Mutant("borrow", "mac", "(whole - low) >> LOW_BITS", "whole >> LOW_BITS", THREE),
    Mutant("first sum", "tile", "(first ? 0 : partial[c][p])", "(first ? 1 : partial[c][p])"),
    Mutant("groups", "tile", "first ? part : total + part", "first ? part : total - part"),
    Mutant("bias", "tile", "bias ? scaled + add : scaled", "bias ? scaled - add : scaled"),
    Mutant(
        *("order of scales", "numerics", "static_cast<float>(accumulator) * scale;"),
        *("static_cast<float>(accumulator) * row_scale * channel_scale + 0.0f * scale;", INT8),
    ),
    Mutant(
        "truncated", "numerics", "round_half_even(clamp(value * inverse, 127.0f))", "clamp(value * inverse, 127.0f)"
    ),
    Mutant("knots", "activation", "Table::knot(index + 1) - knot", "Table::knot(index) - knot"),
    Mutant("mapping", "mapping", "computes ? core : 0;\n        pass_of", "0 * core;\n        pass_of", THREE),
    Mutant("passes", "mapping", "pass += computes && last ? 1 : 0", "pass += computes && last ? 0 : 0"),
    # Rows on chip.
    Mutant("epsilon", "row_core", "scale * scale + epsilon", "scale * scale + 0.0f * epsilon"),
    Mutant(
        *("order of a norm", "row_core", "* inverse * unpack_float(weight, lane)"),
        "* (inverse * unpack_float(weight, lane))",
    ),
    Mutant("mean", "row_core", "unpack_float(x, lane) - mean", "unpack_float(x, lane) + mean", LEARNED),
    Mutant("norm's bias", "step_rows", "[f.word[NORM_WEIGHT] + words + i]", "[f.word[NORM_WEIGHT] + i]", LEARNED),
    Mutant("rotation", "row_core", "first_half ? straight - crossed", "first_half ? straight + crossed"),
    Mutant(
        "end of RoPE", "step_rows", "(position < last ? position : last)", "(position < last ? position : last - 1)"
    ),
    Mutant("row words", "step_rows", "input[first + b * words + i]", "input[first + i]"),
    Mutant(
        "residual",
        "row_core",
        "unpack_float(left, lane) + unpack_float(right, lane)",
        "unpack_float(left, lane) - unpack_float(right, lane)",
    ),
    # Attention.
    Mutant("low limb", "attention_core", "static_cast<int8_t>(mantissa & ((1 << LIMB_BITS) - 1))", "int8_t(0)"),
    Mutant("no interpolation", "attention_core", "(fraction & 255)", "0"),
    Mutant("wide rounding", "attention_core", "round_half_even(known ? value", "static_cast<int32_t>(known ? value"),
    Mutant("window", "step_control", "kept < window ? kept : window;", "kept < window ? kept : window - 1;"),
    Mutant("begin", "step_control", "(behind - count) % ring", "(behind - count + 1) % ring"),
    # Keys and values.
    Mutant("ring", "step_control", "(position - sinks) % ring;", "(position - sinks) % (ring + 1);"),
    Mutant("exponents of keys", "cache_core", "row % KEY_ROWS, exponents[i]", "(row + 1) % KEY_ROWS, exponents[i]"),
    Mutant("exponents of values", "cache_core", "(now.number & 1u) == half", "(now.number & 1u) != half"),
    Mutant("ports of keys", "cache_core", "turned + 1 == PORTS ? 0 : turned + 1", "turned"),
    Mutant(
        "rounded values", "cache_core", "static_cast<int8_t>(round_half_even(scaled))", "static_cast<int8_t>(scaled)"
    ),
    # The gate.
    Mutant("score", "tas_core", "sum + (low + high)", "sum + (low - high)"),
    Mutant("head weights", "tas_core", "unpack_float(query, 0) * factor", "unpack_float(query, 0)", INT8),
    Mutant("change", "gate_core", "so_far.change + change", "so_far.change - change", THREE),
    Mutant("network", "gate_core", "return sum + total", "return sum - total", LEARNED),
    Mutant("chain limit", "tas_core", "chain[row] < max_chain", "chain[row] <= max_chain", THREE),
    Mutant("register", "drs", "= index_register;", "= index_register ^ 1;", "linears_int4"),
    Mutant("chain count", "drs", "counts[row] + 1u", "counts[row] + 2u"),
    Mutant("pairs", "tas_core", "replay & (replay >> half) &", "(replay | (replay >> half)) &"),
    Mutant("refresh", "drs", "remainder_of(step, period) < frame", "remainder_of(step, period) <= frame", LEARNED),
    Mutant("first frame", "drs", "step < frame ||", "step + 1 < frame ||", INT8),
    Mutant("forced rows", "drs", "replay &= ~call.computes", "replay &= ~(call.computes & 0u)"),
    Mutant("register of a step", "step_rows", "= answer[drs::R_INDEX_REGISTER];", "= call.active;"),
    # Replay.
    Mutant("slots", "step_control", "% slots * sizes.videos + list.video[b]", "% slots * sizes.videos"),
    Mutant("replayed", "step_rows", "kept && !computes ? words : 0", "kept && !computes && words == 0 ? words : 0"),
    Mutant("kept", "step_rows", "kept && computes ? words : 0", "kept ? words : 0"),
    Mutant(
        "kept x",
        "step_rows",
        "row_computes(computing & list.deciding, b)",
        "row_computes(computing | list.deciding, b)",
        THREE,
    ),
    Mutant("commit", "step_control", "(list.before[b] - 1) % slots", "list.before[b] % slots", "tas, 2 of 2"),
    # The program.
    Mutant("CRC", "drs", "if (~crc != header[F_CRC])", "if (~crc != header[F_CRC] && count == 0)"),
    Mutant("length", "drs", "header[F_WORDS] != count", "header[F_WORDS] > count + 1"),
]


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`project(design)`: the folder of a project without a fault, emitted once."""

    @cache
    def emitted(name: str) -> Path:
        folder = tmp_path_factory.mktemp("project")
        made = DECODERS.get(name)
        if made is None:
            emit_hls(DESIGNS[name], folder)
        else:
            emit_hls(made.made, folder, made.table, step=StepDesign.of(made.program, 2))
        return folder

    return emitted


@pytest.mark.parametrize(
    "mutant", [*FIRST, *(pytest.param(own, marks=pytest.mark.thorough) for own in OTHERS)], ids=lambda own: own.name
)
def test_a_bench_finds_it(
    csim_tools: None,
    require_tool: Callable[[str], str],
    precompiled: Precompiled,
    project: Callable[[str], Path],
    mutant: Mutant,
    tmp_path: Path,
) -> None:
    """It compiles without a warning, and its bench says FAIL."""
    require_tool("make")
    header = f"fastcar_{mutant.header}.hpp"
    for source in filter(Path.is_file, project(mutant.design).iterdir()):
        text = source.read_text()
        if source.name == header:
            assert text.count(mutant.right) == 1
            text = text.replace(mutant.right, mutant.wrong)
        (tmp_path / source.name).write_text(text)
    built = run("make", "build/step_testbench", *fast_build(tmp_path, "g++", precompiled), cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    done = run("build/step_testbench", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "FAIL: " in done.stdout
