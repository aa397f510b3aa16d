"""What lets an open HLS tool take the controller with no edit: literal pragmas, steps without loops, sizes of buffers.

Such a tool (Bambu) knows the lower-case word `interface` only, refuses two depths on one bundle, takes addresses as
arguments, and pipelines functions that have no loop.
"""

import re
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from hls import lint

from drs.tables import LIMITS, table_for
from fastcar_compile.codegen.hls.control_table.table import AttentionShape, table_words
from fastcar_compile.codegen.hls.interface import drs_interface
from fastcar_compile.codegen.hls.project import emit_drs
from fastcar_compile.runtime.backends.hls_csim import ap_types_folder, compiler

SOURCES = ("fastcar_drs.hpp", "fastcar_drs_scores.hpp", "fastcar_drs_table.hpp", "fastcar_tas_core.hpp")
STEPS = {"crc_step", "product_step", "remainder_step"}
MDPI = """#include <stddef.h>
#include <stdio.h>
inline void m_param_alloc(unsigned index, size_t bytes) { printf("%u %zu\\n", index, bytes); }
"""


def find_open_interface(text: str, memories: list[str]) -> list[str]:
    """What is wrong with the interface that FASTCAR_PRAGMAS_NONE leaves: one literal line per memory argument."""
    lines = re.findall(r"^\s*#pragma HLS (.*)$", text, re.MULTILINE | re.IGNORECASE)
    pattern = re.compile(r"interface mode=m_axi port=(\w+) bundle=\w+ offset=direct")
    named = [match[1] for line in lines if (match := pattern.fullmatch(line))]
    found = [f"pragma: {line}" for line in lines if not pattern.fullmatch(line)]
    return found + [f"port: {name}" for name in sorted({*named} ^ {*memories})]


def find_dividers(text: str) -> list[str]:
    """Divisions and remainders, besides those of constants, which are folded."""
    return re.findall(r"[\w\])]+ [/%] (?![A-Z0-9_]+\b)\w+|\b[a-z]\w*[\w\])]* [/%] \w+", lint.code_of(text))


def find_loops_below(texts: list[str], steps: set[str]) -> list[str]:
    """Loops in these functions or in what they call, and steps that are not there."""
    bodies = {name: body for text in texts for name, _, body in lint.functions(lint.code_of(text))}
    found, queue = [f"no {step}" for step in steps - set(bodies)], sorted(steps & set(bodies))
    reached = set(queue)
    while queue:
        body = bodies[queue.pop()]
        found += re.findall(r"\bfor\b.*", body)
        called = (set(re.findall(r"\b(\w+)\(", body)) & set(bodies)) - reached
        queue, reached = queue + sorted(called), reached | called
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The controller's own files and all headers."""
    table = table_for(2, attention=AttentionShape(4, 2, 6))
    for name, text in emit_drs(table, LIMITS).items():
        (tmp_path / name).write_text(text)
    return tmp_path


def sources() -> list[str]:
    return [(files("hls_templates") / name).read_text() for name in SOURCES]


def include(folder: Path) -> list[str]:
    return [f"-I{folder}", f"-I{files('hls_templates')}", "-isystem", str(ap_types_folder())]


def test_the_interface_is_literal_and_of_addresses(csim_tools: None, project: Path) -> None:
    command = [compiler(), "-E", "-P", "-DFASTCAR_PRAGMAS_NONE", *include(project), str(project / "fastcar_drs.cpp")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    memories = [port.name for port in drs_interface(1).memories()]
    assert find_open_interface(text, memories) == []
    line = next(line for line in text.splitlines() if "port=query" in line)
    for wrong in ("", line.replace("interface", "INTERFACE"), line.replace("direct", "slave"), f"{line} depth=8"):
        assert find_open_interface(text.replace(line, wrong), memories)


def test_nothing_is_divided() -> None:
    assert [found for text in sources() for found in find_dividers(text)] == []
    for line in ("const uint32_t group = heads / kv_heads;", "a = rows % 2;", "x = shape.heads / shape.kv_heads;"):
        assert find_dividers(line)
    assert not find_dividers("FASTCAR_TRIPS(1, ANSWER_WORDS / 4)")


def test_steps_have_no_loop() -> None:
    assert find_loops_below(sources(), STEPS) == []
    assert find_loops_below(["int a_step(int x) { for (int i = 0; i < 2; ++i) { x += i; } return x; }"], {"a_step"})
    assert find_loops_below(["int b(int x) { for (;;) {} }", "int a_step(int x) { return b(x); }"], {"a_step"})
    assert find_loops_below([], {"a_step"}) == ["no a_step"]


def test_the_bench_tells_every_buffer_before_every_call(csim_tools: None, project: Path) -> None:
    """To a stand-in for the simulator's header, which prints what it is told."""
    (project / "mdpi").mkdir()
    (project / "mdpi" / "mdpi_user.h").write_text(MDPI)
    program = project / "bench"
    options = ["-std=c++14", "-O1", "-D__BAMBU_SIM__", *include(project)]
    files_ = [str(project / name) for name in ("fastcar_drs.cpp", "drs_testbench.cpp")]
    command = [compiler(), *options, *files_, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    *told, verdict = done.stdout.splitlines()
    assert (done.returncode, verdict) == (0, "PASS: DRS, 4 pattern(s), 0 mismatch(es)"), done.stdout
    sizes = [tuple(map(int, line.split())) for line in told]
    table_bytes = -(-table_words(3) // 4) * 16
    decided = [(0, table_bytes), (1, 2 * 8 * 16), (2, 2 * 4 * 16), (3, 8 * 16), (4, 17 * 16)]
    empty = [(0, table_bytes), (1, 16), (2, 16), (3, 8 * 16), (4, 17 * 16)]
    assert sizes == [*empty, *decided * 4, *empty, *empty]
