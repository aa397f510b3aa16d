"""Rules for the HLS sources of a kernel of whole steps (CONTRIBUTING.md), as tests/hls has them for short programs."""

import re

import pytest
from hls import lint
from hls.memory_ports import Sources
from hls.test_lint import AXI_PORTS, CORES, NOT_SYNTHESISED, findings
from hls.test_recurrences import step_recurrences

from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.project import emit_hls
from step.test_step import DECODERS

ATTENTION = "fastcar_attention_processes.hpp"
STREAM_FILES = ("fastcar_engine_processes.hpp", "fastcar_step_processes.hpp", ATTENTION, "fastcar_value_processes.hpp")
STEP_CORES = ("fastcar_cache_core.hpp", "fastcar_attention_core.hpp", "fastcar_row_core.hpp", "fastcar_step_rows.hpp")


@pytest.fixture(scope="module", params=["tas", "input_delta, 3 of 1"])
def gate(request: pytest.FixtureRequest) -> str:
    """Decoders in both quantisations; the second has two weight ports on an AXI port, and a draft."""
    return str(request.param)


@pytest.fixture(scope="module")
def sources(gate: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> text of what is synthesised."""
    made, folder = DECODERS[gate], tmp_path_factory.mktemp("sources")
    found = emit_hls(made.made, folder, made.table, step=StepDesign.of(made.program, 2))
    return {p.name: p.read_text() for p in found if p.suffix in (".hpp", ".cpp") and p.name not in NOT_SYNTHESISED}


def test_the_sources_are_clean(sources: dict[str, str]) -> None:
    assert findings(sources) == []


def test_its_regions_are_canonical(sources: dict[str, str], gate: str) -> None:
    """DATAFLOW as Vitis HLS wants it; every FIFO has one producer and one consumer."""
    top, made = sources["fastcar_step.cpp"], DECODERS[gate].made
    processes = "".join(sources[name] for name in STREAM_FILES)
    assert lint.find_bad_dataflow([top, processes, *(sources[name] for name in CORES)]) == []
    sizes = {"EngineConfig::PORTS": made.ports, AXI_PORTS: made.axi_weight_ports}
    assert lint.find_shared_streams(top, processes, sizes) == []
    wrong = top.replace("key_exponents, key_sums, query_scales,", "value_exponents, key_sums, query_scales,")
    assert lint.find_shared_streams(wrong, processes, sizes)


def test_one_unit_serves_every_instruction_of_its_kind(sources: dict[str, str]) -> None:
    """One call site each, but multipliers of keys and of values."""
    code = "".join(lint.code_of(text) for text in sources.values())
    calls_of = {"compute": 1, "call_controller": 1, "normalize": 1, "add_row": 1, "multiply_blocks": 2}
    for function, calls in calls_of.items():
        assert len(re.findall(rf"(?<!void )\b{function}<[^;(){{}}]*>\(", code)) == calls, function


@pytest.mark.parametrize(
    ("name", "right", "wrong", "problem"),
    [
        ("fastcar_step.hpp", "", "", ""),
        ("fastcar_step_config.hpp", "TOTAL_TURNS 4", "TOTAL_TURNS 3", "add_sums: 3 iterations, 4 clocks"),
        (ATTENTION, "(input, 2)", "(input, 1)", "input of multiply_blocks.multiply_words: 1 iter"),
        (ATTENTION, "FASTCAR_RECURRENCE(found, 1)", "", "found of soften.keep_logits is not declared"),
    ],
)
def test_every_loop_keeps_its_interval(
    sources: dict[str, str], gate: str, name: str, right: str, wrong: str, problem: str
) -> None:
    """The sources declare the distances of the list (tests/hls has the array's), and a planted fault is found."""
    made, changed = DECODERS[gate].made, sources | {name: sources[name].replace(right, wrong)}
    assert right in sources[name]
    listed = step_recurrences(made)
    found = lint.find_slow_recurrences(
        [changed[n] for n in (*STREAM_FILES[1:], *STEP_CORES)],
        changed["fastcar_config.hpp"] + changed["fastcar_step_config.hpp"],
        [(r.loop, r.variable, r.distance, r.latency) for r in listed],
    )
    assert all(r.keeps_pace for r in listed)
    assert (found == []) == (problem == "")
    assert any(problem in text for text in [*found, ""])


def crowded(sources: dict[str, str], ports: int) -> list[str]:
    """Loops whose accesses to a memory take more than its two ports, on so many weight ports."""
    found = Sources(list(sources.values()))
    found.constants["PORTS"] = ports
    return found.findings()


def test_no_loop_needs_more_ports_than_its_memory_has(sources: dict[str, str]) -> None:
    assert crowded(sources, 4) == []


CROWDED = [
    ("fastcar_row_core.hpp", "FASTCAR_PIPELINE(2)", "FASTCAR_PIPELINE(1)", "rotate_words: 4 accesses of y"),
    ("fastcar_step.cpp", "FASTCAR_PARTITION_CYCLIC(answer, 1, 4)", "", "write_words: 4 accesses of answer"),
    ("fastcar_engine_processes.hpp", "FASTCAR_PARTITION(acc, 2)", "", "mac_tile.words: 3 accesses of acc"),
]
"""File, text, the text with a fault, what is found of it."""


@pytest.mark.parametrize("gate", ["tas"], indirect=True)
def test_loops_with_too_many_accesses_are_found(sources: dict[str, str]) -> None:
    changed = dict(sources)
    for name, right, wrong, _ in CROWDED:
        assert changed[name].count(right) == 1
        changed[name] = changed[name].replace(right, wrong)
    found = crowded(changed, 3)
    for *_, problem in CROWDED:
        assert any(problem in text for text in found), found
