"""The emitted project: files, interfaces, test bench and error texts."""

import os
import re
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Precompiled

from fastcar_compile.codegen.hls.project import emit_hls, generated_headers
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.ops.linear import FACTORS, activation_factor
from fastcar_compile.runtime.backends.hls_csim import ap_types_folder, open_library
from hls.library import DESIGNS, assert_same_bits
from hls.sources import folder_sources

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A finished command with its texts."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def check_syntax(compiler: str, sources: list[Path], *options: str) -> subprocess.CompletedProcess[str]:
    """The compiler on sources, with every warning an error; no code is made."""
    include = ["-isystem", str(ap_types_folder())]
    return run(compiler, "-std=c++14", "-fsyntax-only", *WARNINGS, *options, *include, *map(str, sources))


def write_generated(folder: Path) -> None:
    for name, text in generated_headers().items():
        (folder / name).write_text(text)


@pytest.mark.thorough  # every run builds all of them, by way of others
def test_headers_compile_alone(csim_tools: None, tmp_path: Path) -> None:
    write_generated(tmp_path)
    names = [path.name for path in files("hls_templates").iterdir() if path.name.endswith(".hpp")]
    sources = [tmp_path / f"{name}.cpp" for name in names]
    for source in sources:
        source.write_text(f'#include "{source.stem}"\n')
    done = check_syntax("g++", sources, f"-I{files('hls_templates')}", f"-I{tmp_path}")
    assert done.returncode == 0, done.stderr


def test_every_emitted_source_compiles_by_clang(
    csim_tools: None, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    """By g++ the tests build every source, with the same warnings as errors; and by clang the test benches, with the
    kernels."""
    require_tool("clang++")
    sources = {path.name for path in emit_hls(DESIGNS["int4"], tmp_path) if path.suffix == ".cpp"}
    kernels = {f"fastcar_{name}.cpp" for name in ("step", "probe")}
    assert sources - kernels == {"step_testbench.cpp"}
    done = check_syntax("clang++", [tmp_path / "fastcar_step.cpp"])
    assert done.returncode == 0, done.stderr


def run_program(text: str, folder: Path, *options: str) -> bytes:
    """What a C++ program that uses the headers prints."""
    source, program = folder / "program.cpp", str(folder / "program")
    source.write_text(text)
    write_generated(folder)
    include = [f"-I{files('hls_templates')}", f"-I{folder}", "-isystem", str(ap_types_folder())]
    flags = ["-std=c++14", "-O1", "-ffp-contract=off", *WARNINGS, *options, *include]
    built = run("g++", *flags, str(source), "-o", program)
    assert built.returncode == 0, built.stderr
    return subprocess.run([program], capture_output=True, check=True).stdout


def test_activations_and_rounding_of_the_kernel_at_every_step(csim_tools: None, tmp_path: Path) -> None:
    """All 32,769 inputs that a table can tell apart, the ties between them, and what lies outside."""
    steps = np.arange(-2 * 16384 - 64, 2 * 16384 + 65, dtype=np.int32)
    names = sorted(FACTORS)
    factors = [f"fastcar::factor<fastcar::{n.upper()}>(i * {FACTORS[n].limit / 32768}f)" for n in names]
    output = run_program(
        '#include <stdio.h>\n#include "fastcar_numerics.hpp"\n'
        "int main() {\n"
        f"  for (int i = {steps[0]}; i <= {steps[-1]}; ++i) {{\n"
        f"    const float values[4] = {{fastcar::round_half_even(i / 2.0f) + 0.0f, {', '.join(factors)}}};\n"
        "    fwrite(values, sizeof(float), 4, stdout);\n  }\n  return 0;\n}\n",
        tmp_path,
    )
    got = np.frombuffer(output, np.float32).reshape(-1, 4)
    np.testing.assert_array_equal(got[:, 0], np.rint(steps / 2.0))
    for column, name in enumerate(names, 1):
        x = steps.astype(np.float32) * np.float32(FACTORS[name].limit / 32768)
        assert_same_bits(np.ascontiguousarray(got[:, column]), activation_factor(torch.from_numpy(x), name).numpy())


SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all"


def fast_build(folder: Path, cxx: str, precompiled: Precompiled) -> list[str]:
    """What `make` gets to build with this compiler in half the time: the project's own CXXFLAGS without optimisation,
    and for g++ precompiled types."""
    (flags,) = re.findall(r"^CXXFLAGS := (.*)$", (folder / "Makefile").read_text(), re.MULTILINE)
    assert "-O2" in flags
    types, (name, *options), flags = str(ap_types_folder()), cxx.split(), flags.replace("-O2", "-O0")
    options += precompiled([*options, *flags.split(), "-isystem", types]) if name == "g++" else []
    return [f"CXX={' '.join([name, *options])}", f"CXXFLAGS={flags}", f"AP_TYPES={types}"]


@pytest.mark.parametrize(
    ("design_name", "cxx", "said"),
    [
        pytest.param(
            *("linears", f"g++ {SANITIZED}", "13 launch(es) of 5 row(s), 0 problem(s)"), marks=pytest.mark.thorough
        ),
        pytest.param("linears_int4", "clang++", "13 launch(es) of 2 row(s), 0 problem(s)", marks=pytest.mark.thorough),
        pytest.param("one_port_many_tiles", "g++ -DFASTCAR_WORD_BY_RANGE", "5 launch(es)", marks=pytest.mark.thorough),
    ],
    ids=["sanitized", "clang", "ranges"],
)
def test_test_bench_passes(
    csim_tools: None,
    require_tool: Callable[[str], str],
    precompiled: Precompiled,
    design_name: str,
    cxx: str,
    said: str,
    tmp_path: Path,
) -> None:
    """All test benches: under AddressSanitizer and UBSan, by clang, and with words taken apart as in hardware. The
    last is built as users build it."""
    require_tool("make")
    require_tool(cxx.partition(" ")[0])
    emit_hls(DESIGNS[design_name], tmp_path)
    own = [f"CXX={cxx}", f"AP_TYPES={ap_types_folder()}"]
    given = own if "RANGE" in cxx else fast_build(tmp_path, cxx, precompiled)
    done = run("make", "csim", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASS: {said}" in done.stdout


def test_makefile_asks_for_the_headers(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    require_tool("make")
    emit_hls(DESIGNS["example"], tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "AP_TYPES"}
    done = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "set AP_TYPES to the folder of ap_int.h" in done.stderr


def test_the_library_is_reused(csim_tools: None, tmp_path: Path) -> None:
    emit_hls(DESIGNS["eight_ports_one_row"], tmp_path / "hls")
    first = open_library(folder_sources(tmp_path / "hls"), tmp_path / "build")
    (library,) = (tmp_path / "build").iterdir()
    stamp = library.stat().st_mtime_ns
    second = open_library(folder_sources(tmp_path / "hls"), tmp_path / "build")
    assert [p.stat().st_mtime_ns for p in (tmp_path / "build").iterdir()] == [stamp]
    assert first._handle != second._handle  # an accelerator each
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del first, second
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "a library stays loaded"


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emit_hls(DESIGNS["example"], tmp_path / "hls")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match="needs no-such-compiler, which is not on PATH"):
        open_library(folder_sources(tmp_path / "hls"), tmp_path)
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setenv("AP_TYPES", str(tmp_path))
    with pytest.raises(BackendError, match=r"needs ap_int.h\n(.*\n)*.*install the extra `csim`"):
        open_library(folder_sources(tmp_path / "hls"), tmp_path)


def test_sources_that_do_not_compile_are_reported(csim_tools: None, tmp_path: Path) -> None:
    emit_hls(DESIGNS["example"], tmp_path / "hls")
    (tmp_path / "hls" / "fastcar_config.hpp").write_text("#error damaged\n")
    with pytest.raises(BackendError, match=r"(?s)g\+\+ could not build the C simulation:.*#error damaged"):
        open_library(folder_sources(tmp_path / "hls"), tmp_path / "build")
    assert not list((tmp_path / "build").glob("*.so"))
