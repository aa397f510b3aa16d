"""The emitted project: choice of the design, files, interfaces, test bench and error texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.csim import CsimLibrary, ap_types_folder
from fastcar_compile.codegen.hls.design import choose_design
from fastcar_compile.codegen.hls.emit import emit_hls
from fastcar_compile.codegen.hls.interface import drs_interface, mlp_interface
from fastcar_compile.codegen.hls.spec import MlpSpec
from fastcar_compile.codegen.hls.weights import LinearWeights, pack_mlp
from fastcar_compile.errors import BackendError, UserError
from hls.library import DESIGNS, LIMITS, assert_same_bits, design, factor, factor_table, random_layer, zcu102

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
HEADERS = sorted(p.name for p in files("hls_templates").iterdir() if p.name.endswith(".hpp"))


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A finished command with its texts."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@settings(deadline=None)
@given(
    hidden=st.integers(1, 9000), intermediate=st.integers(1, 20000), batch=st.integers(1, 4), ports=st.integers(3, 12)
)
def test_designs_keep_their_budget_and_cover_every_channel(
    hidden: int, intermediate: int, batch: int, ports: int
) -> None:
    made, budget = design(hidden, intermediate, batch, batch, ports), zcu102(ports)
    assert made.ports + 2 <= ports
    assert not made.usage.over(budget.lut, budget.ff, budget.dsp, budget.bram36, budget.uram)
    for stage, channels in ((made.gate_up, 2 * intermediate), (made.down, hidden)):
        assert stage.tiles * stage.tile * stage.ports >= channels
        assert (stage.tiles - 1) * stage.tile * stage.ports < channels
    assert made.gate_up.tile * made.ports % 2 == 0


def test_the_seven_billion_parameter_shape_fits_zcu102() -> None:
    made = design(4096, 11008, 2, 2)
    assert (made.ports, made.lanes) == (4, 128)
    assert made.usage.bram36 <= 912 * 80 // 100
    assert json.loads(json.dumps(made.to_json()))["ports"] == 4


def test_fewer_ports_when_the_lanes_do_not_fit() -> None:
    assert design(128, 352, 16, 4).ports == 4  # twice 1,024 lanes in 1,024 DSP
    assert design(128, 352, 32, 4).ports == 2  # 4 ports would take 2,048 DSP of 2,016 for products
    assert design(128, 352, 32, 4, quant="w4a8").ports == 1


def test_what_does_not_fit_is_told_in_numbers() -> None:
    spec = MlpSpec(hidden=128, intermediate=352, batch=2, layers=4, cores=2)
    with pytest.raises(UserError, match=r"does not fit xczu9eg.*DSP 212 of 10"):
        choose_design(spec, replace(zcu102(), dsp=10))
    with pytest.raises(UserError, match=r"has 2 memory port.s. of 128 bits; the kernel needs 3 of 128"):
        choose_design(spec, zcu102(2))
    known = "act one of silu, gelu, gelu_tanh, relu, and w8a8 or w4a8"
    with pytest.raises(UserError, match=f"(?s)no HLS kernel for a plain w8a8 MLP with activation 'tanh'.*{known}"):
        choose_design(replace(spec, activation="tanh", gated=False), zcu102())
    with pytest.raises(UserError, match=r"batch = 33 .*; cores = 0 "):
        choose_design(replace(spec, batch=33, cores=0), zcu102())


@settings(deadline=None, max_examples=30)
@given(
    hidden=st.integers(1, 70), intermediate=st.integers(1, 70), ports=st.integers(3, 10), seed=st.integers(0, 2**32 - 1)
)
def test_packing_keeps_every_weight_and_pads_with_zeros(hidden: int, intermediate: int, ports: int, seed: int) -> None:
    made = design(hidden, intermediate, 1, 1, ports)
    layer = random_layer(made.spec, np.random.default_rng(seed))
    ones = [LinearWeights(np.ones_like(n.values), np.zeros_like(n.scales)) for n in layer]
    stream = pack_mlp(ones, made)
    assert stream.shape == (made.stream_bytes,)
    assert stream.sum() == 3 * hidden * intermediate
    assert stream.size % (4096 * made.ports) == 0


def test_an_int4_stream_is_nibbles_scales_and_biases() -> None:
    """One port, one tile: the whole section by hand."""
    made = design(130, 3, 1, 1, ports=3, quant="w4a8", gated=False, up_bias=True)
    (up, down), section = random_layer(made.spec, np.random.default_rng(1)), made.port_words * 16
    stream = pack_mlp([up, down], made)
    assert (made.gate_up.tile, made.gate_up.tiles, made.gate_up.head_words, made.gate_up.channel_words) == (3, 1, 2, 8)
    assert not stream[section:].any()
    np.testing.assert_array_equal(stream[:12].view("<f2"), up.scales.reshape(-1))
    assert up.bias is not None
    np.testing.assert_array_equal(stream[16:28].view("<f4"), up.bias)
    row = stream[32 : 32 + 3 * 128].reshape(3, 8, 16).view(np.int8)
    values = np.concatenate([(row << 4) >> 4, row >> 4], axis=2).reshape(3, 256)
    np.testing.assert_array_equal(values, up.values)


def test_weights_of_another_shape_are_refused() -> None:
    made = DESIGNS["example"]
    layer = random_layer(replace(made.spec, intermediate=351), np.random.default_rng(0))
    with pytest.raises(UserError, match=r"gate.values is int8 \[351, 128\]; the design expects int8 \[352, 128\]"):
        pack_mlp(layer, made)
    biased = random_layer(replace(made.spec, down_bias=True), np.random.default_rng(0))
    with pytest.raises(UserError, match="down has a bias; the design expects none"):
        pack_mlp(biased, made)
    with pytest.raises(UserError, match="2 linears were given; the design takes gate, up, down"):
        pack_mlp(layer[1:], made)


def test_every_argument_has_its_pragmas(tmp_path: Path) -> None:
    made = DESIGNS["example"]
    emit_hls(made, tmp_path)
    for kernel in (mlp_interface(made), drs_interface(100)):
        text = (tmp_path / f"{kernel.name}.cpp").read_text()
        for name in [*(p.name for p in kernel.ports), "return"]:
            assert re.search(rf"#pragma HLS INTERFACE mode=s_axilite port={name} bundle=control\n", text), name
        for port in kernel.ports:
            memory = re.search(rf"mode=m_axi port={port.name} bundle={port.bundle} ", text)
            assert (memory is not None) == (port.mode == "m_axi")


def test_configurations_name_part_clock_and_memories(tmp_path: Path) -> None:
    emit_hls(DESIGNS["example"], tmp_path)
    config = (tmp_path / "fastcar_mlp_hls_config.cfg").read_text()
    assert "part=xczu9eg-ffvb1156-2-e\n" in config
    assert "clock=250MHz\n" in config
    assert "tb.file=testbench.cpp\n" in config
    drs_config = (tmp_path / "fastcar_drs_hls_config.cfg").read_text()
    assert "syn.top=fastcar_drs\n" in drs_config
    assert "tb.file=drs_testbench.cpp\n" in drs_config
    link = (tmp_path / "link.cfg").read_text().splitlines()
    assert "nk=fastcar_mlp:1:fastcar_mlp_1" in link
    assert "sp=fastcar_mlp_1.weights_3:HP3" in link
    assert "freqHz=250000000:fastcar_drs_1" in link


def test_table_header_holds_the_documented_integers() -> None:
    text = (files("hls_templates") / "fastcar_activation_tables.hpp").read_text()
    tables = [[int(n) for n in re.findall(r"\d+", body)] for body in re.findall(r"\{\n([\d,\s]*)\};", text)]
    assert tables == [factor_table(name).tolist() for name in ("silu", "gelu", "gelu_tanh")]


def check_syntax(compiler: str, sources: list[Path], *options: str) -> subprocess.CompletedProcess[str]:
    """The compiler on sources, with every warning an error; no code is made."""
    include = ["-isystem", str(ap_types_folder())]
    return run(compiler, "-std=c++14", "-fsyntax-only", *WARNINGS, *options, *include, *map(str, sources))


def including(names: list[str], folder: Path) -> list[Path]:
    """One source per header that includes nothing else."""
    sources = [folder / f"{name}.cpp" for name in names]
    for source in sources:
        source.write_text(f'#include "{source.stem}"\n')
    return sources


def test_headers_compile_alone(csim_tools: None, tmp_path: Path) -> None:
    assert len(HEADERS) == 17
    done = check_syntax("g++", including(HEADERS, tmp_path), f"-I{files('hls_templates')}")
    assert done.returncode == 0, done.stderr


def test_every_emitted_source_compiles_by_clang(
    csim_tools: None, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    """By g++ the tests build every source, with the same warnings as errors."""
    require_tool("clang++")
    sources = [path for path in emit_hls(DESIGNS["int4"], tmp_path) if path.suffix == ".cpp"]
    assert {"fastcar_mlp.cpp", "fastcar_drs.cpp", "csim_entry.cpp", "testbench.cpp"} <= {p.name for p in sources}
    done = check_syntax("clang++", sources)
    assert done.returncode == 0, done.stderr


def test_headers_compile_without_pragmas(csim_tools: None, tmp_path: Path) -> None:
    sources = including(["fastcar_mlp_processes.hpp", "fastcar_drs.hpp"], tmp_path)
    include = f"-I{files('hls_templates')}"
    done = check_syntax("g++", sources, include, "-DFASTCAR_PRAGMAS_NONE", "-Wunknown-pragmas")
    assert done.returncode == 0, done.stderr


def run_program(text: str, folder: Path, *options: str) -> bytes:
    """What a C++ program that uses the headers prints."""
    source, program = folder / "program.cpp", str(folder / "program")
    source.write_text(text)
    include = [f"-I{files('hls_templates')}", "-isystem", str(ap_types_folder())]
    flags = ["-std=c++14", "-O1", "-ffp-contract=off", *WARNINGS, *options, *include]
    built = run("g++", *flags, str(source), "-o", program)
    assert built.returncode == 0, built.stderr
    return subprocess.run([program], capture_output=True, check=True).stdout


def test_activations_and_rounding_of_the_kernel_at_every_step(csim_tools: None, tmp_path: Path) -> None:
    """All 32,769 inputs that a table can tell apart, the ties between them, and what lies outside."""
    steps = np.arange(-2 * 16384 - 64, 2 * 16384 + 65, dtype=np.int32)
    names = sorted(LIMITS)
    factors = [f"fastcar::factor<fastcar::{n.upper()}>(i * {LIMITS[n] / 32768}f)" for n in names]
    output = run_program(
        '#include <stdio.h>\n#include "fastcar_activation.hpp"\n'
        "int main() {\n"
        f"  for (int i = {steps[0]}; i <= {steps[-1]}; ++i) {{\n"
        f"    const float values[4] = {{fastcar::round_half_even(i / 2.0f) + 0.0f, {', '.join(factors)}}};\n"
        "    fwrite(values, sizeof(float), 4, stdout);\n  }\n  return 0;\n}\n",
        tmp_path,
    )
    got = np.frombuffer(output, np.float32).reshape(-1, 4)
    np.testing.assert_array_equal(got[:, 0], np.rint(steps / 2.0))
    for column, name in enumerate(names, 1):
        x = steps.astype(np.float32) * np.float32(LIMITS[name] / 32768)
        assert_same_bits(np.ascontiguousarray(got[:, column]), factor(x, name))


SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.parametrize(
    ("design_name", "cxx"),
    [("int4", f"g++ {SANITIZED}"), ("tails", "clang++"), ("one_port_many_tiles", "g++ -DFASTCAR_WORD_BY_RANGE")],
    ids=["sanitized", "clang", "ranges"],
)
def test_test_bench_passes(
    csim_tools: None, require_tool: Callable[[str], str], design_name: str, cxx: str, tmp_path: Path
) -> None:
    """Both test benches: under AddressSanitizer and UBSan, by clang, and with words taken apart as in hardware."""
    require_tool("make")
    require_tool(cxx.partition(" ")[0])
    emit_hls(DESIGNS[design_name], tmp_path)
    done = run("make", "csim", f"CXX={cxx}", f"AP_TYPES={ap_types_folder()}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: DRS, " in done.stdout
    assert done.stdout.count("PASS: ") == 2


@pytest.mark.parametrize(
    ("header", "right", "wrong", "bench"),
    [
        ("fastcar_numerics.hpp", "rest > 0.5f", "rest > 0.75f", "testbench"),
        ("fastcar_drs.hpp", "return computing > 0;", "return computing > 1;", "drs_testbench"),
    ],
    ids=["mlp", "drs"],
)
def test_test_benches_find_a_wrong_kernel(
    csim_tools: None,
    require_tool: Callable[[str], str],
    header: str,
    right: str,
    wrong: str,
    bench: str,
    tmp_path: Path,
) -> None:
    """The mutations compile without a warning."""
    require_tool("make")
    emit_hls(DESIGNS["eight_ports_one_row"], tmp_path)
    text = (tmp_path / header).read_text()
    assert text.count(right) == 1
    (tmp_path / header).write_text(text.replace(right, wrong))
    built = run("make", f"build/{bench}", f"AP_TYPES={ap_types_folder()}", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    done = run(f"build/{bench}", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL: " in done.stdout


def test_makefile_asks_for_the_headers(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    require_tool("make")
    emit_hls(DESIGNS["example"], tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "AP_TYPES"}
    done = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "set AP_TYPES to the folder of ap_int.h" in done.stderr


def test_the_library_is_reused(csim_tools: None, build_once: Callable[[str], CsimLibrary], tmp_path: Path) -> None:
    emit_hls(DESIGNS["eight_ports_one_row"], tmp_path / "hls")
    first = CsimLibrary.build(tmp_path / "hls", tmp_path / "build")
    (library,) = (tmp_path / "build").iterdir()
    stamp = library.stat().st_mtime_ns
    second = CsimLibrary.build(tmp_path / "hls", tmp_path / "build")
    assert [p.stat().st_mtime_ns for p in (tmp_path / "build").iterdir()] == [stamp]
    assert (first.hidden, first.stream_bytes) == (second.hidden, DESIGNS["eight_ports_one_row"].stream_bytes)


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emit_hls(DESIGNS["example"], tmp_path / "hls")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match="needs no-such-compiler, which is not on PATH"):
        CsimLibrary.build(tmp_path / "hls", tmp_path)
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setenv("AP_TYPES", str(tmp_path))
    with pytest.raises(BackendError, match=r"needs ap_int.h\n(.*\n)*.*install the extra `csim`"):
        CsimLibrary.build(tmp_path / "hls", tmp_path)


def test_sources_that_do_not_compile_are_reported(csim_tools: None, tmp_path: Path) -> None:
    emit_hls(DESIGNS["example"], tmp_path / "hls")
    (tmp_path / "hls" / "fastcar_config.hpp").write_text("#error damaged\n")
    with pytest.raises(BackendError, match=r"(?s)g\+\+ could not build the C simulation:.*#error damaged"):
        CsimLibrary.build(tmp_path / "hls", tmp_path / "build")
    assert not list((tmp_path / "build").glob("*.so"))
