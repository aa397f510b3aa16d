"""The emitted project: choice of the design, files, interfaces, test bench and error texts."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from conftest import Precompiled
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.artifact.sections import DesignPart
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.exploration import designs
from fastcar_compile.codegen.hls.design.spec import LinearSpec, MlpSpec
from fastcar_compile.codegen.hls.interface import ControlSizes, drs_interface, engine_interface
from fastcar_compile.codegen.hls.packing import LinearWeights, pack_linear, pack_mlp
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.errors import BackendError, CompileError, UserError
from fastcar_compile.runtime.backends.hls_csim.build import ap_types_folder, folder_sources, open_library
from fastcar_compile.targets import load_target
from hls.library import (
    DESIGNS,
    EXAMPLE,
    LIMITS,
    LINEARS,
    Linear,
    assert_same_bits,
    best,
    design,
    factor,
    factor_table,
    random_layer,
    zcu102,
)

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
HEADERS = sorted(p.name for p in files("hls_templates").iterdir() if p.name.endswith(".hpp"))


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A finished command with its texts."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@settings(deadline=None)
@given(
    hidden=st.integers(1, 9000),
    intermediate=st.integers(1, 20000),
    batch=st.integers(1, 4),
    ports=st.integers(3, 12),
    linear=st.tuples(st.integers(1, 9000), st.integers(1, 40_000), st.booleans()),
)
def test_designs_keep_their_budget_and_cover_every_channel(
    hidden: int, intermediate: int, batch: int, ports: int, linear: tuple[int, int, bool]
) -> None:
    made, budget = design(hidden, intermediate, batch, batch, ports, linears=[("a", *linear)]), zcu102(ports)
    assert made.ports + 2 <= ports
    assert not made.usage.over(budget)
    assert [p.channels for p in made.products] == [2 * intermediate, hidden, linear[1]]
    for product in made.products:
        channels = product.tile * product.ports
        assert (product.tiles - 1) * channels < product.channels <= product.tiles * channels
        assert channels % 4 == 0
        assert product.inputs <= made.max_inputs
        assert product.tile_words <= made.max_tile_words
        assert product.head_words <= made.max_head_words
    again = made.fit(LinearSpec("a", *linear))
    assert again.tile_words <= made.max_tile_words
    assert again.tiles * again.tile * again.ports >= linear[1]


LLAMA_7B_LINEARS = (("layer_0.qkv", 4096, 12288, False), ("layer_0.o", 4096, 4096, False), ("head", 4096, 32000, False))


@pytest.mark.parametrize("linears", [(), LLAMA_7B_LINEARS], ids=["mlp", "linears"])
def test_the_seven_billion_parameter_shape_fits_zcu102(linears: tuple[tuple[str, int, int, bool], ...]) -> None:
    """Buffers are those of the widest use, down's 11008 inputs."""
    made = design(4096, 11008, 2, 2, layers=32, linears=linears)
    assert (made.ports, made.lanes, made.max_inputs) == (4, 128, 11008)
    assert made.usage.bram36 <= 912 * 80 // 100
    assert Design.of(DesignPart.model_validate_json(made.part.model_dump_json())) == made
    for name in made.linears:
        if name == "head":
            head = made.linears[name]
            assert 32000 * (4096 + 4) <= head.stream_bytes <= 32000 * (4096 + 16) + 4 * 4096
            # Memory-bound: a port gives a word per clock, and everything else adds less than a tenth.
            assert head.port_words <= made.cycles("head") <= 1.1 * head.port_words


def test_an_engine_for_mlps_alone_costs_what_one_with_linears_does() -> None:
    """One kernel for both: with equal tiles the MLP takes the same clocks, and linears of its width add nothing."""
    also = design(128, 352, 2, 2, linears=EXAMPLE)
    alone = replace(also, linears={})
    assert alone.mlp_cycles == also.mlp_cycles
    assert alone.usage.dsp == also.usage.dsp


def test_more_cores_share_the_ports_and_the_tiles() -> None:
    """Two cores more cost multipliers and rows, no weight port and no copy of a tile."""
    four, eight = (design(128, 352, 32, cores, quant="w4a8") for cores in (4, 8))
    assert four.ports == eight.ports == 4
    assert (four.passes, eight.passes) == (8, 4)
    assert eight.lanes == 2 * four.lanes == 1024
    wider = replace(four, mlp=replace(four.mlp, cores=8))
    assert wider.usage.dsp > four.usage.dsp
    assert replace(wider, tiles_in_uram=True).usage.uram == replace(four, tiles_in_uram=True).usage.uram > 0


def test_wider_linears_than_the_mlp_widen_the_buffers() -> None:
    narrow, wide = (design(64, 96, 2, 2, linears=[("o", inputs, 64, False)]) for inputs in (64, 20_000))
    assert (narrow.max_inputs, wide.max_inputs) == (96, 20_000)
    assert wide.usage.bram36 > narrow.usage.bram36
    assert wide.usage.dsp == narrow.usage.dsp


def test_what_cannot_be_built_is_told() -> None:
    spec = MlpSpec(hidden=128, intermediate=352, batch=2, layers=4, cores=2)
    with pytest.raises(UserError, match=r"has 2 memory port.s. of 128 bits; the engine needs 3 of 128"):
        best(designs(spec, zcu102(2)))
    known = "act one of silu, gelu, gelu_tanh, relu, relu2, and w8a8 or w4a8"
    with pytest.raises(UserError, match=f"(?s)no HLS kernel for a plain w8a8 MLP with activation 'tanh'.*{known}"):
        best(designs(replace(spec, activation="tanh", gated=False), zcu102()))
    with pytest.raises(UserError, match=r"batch = 33 .*; cores = 0 "):
        best(designs(replace(spec, batch=33, cores=0), zcu102()))
    wide = [LinearSpec("a", 1 << 17, 3), LinearSpec("b", 3, 1 << 19)]
    with pytest.raises(CompileError, match=r"65536 inputs and 262144 channels: a is 131072 -> 3; b is 3 -> 524288"):
        best(designs(spec, zcu102(), wide))


@settings(deadline=None, max_examples=30)
@given(
    hidden=st.integers(1, 70), intermediate=st.integers(1, 70), ports=st.integers(3, 10), seed=st.integers(0, 2**32 - 1)
)
def test_packing_keeps_every_weight_and_pads_with_zeros(hidden: int, intermediate: int, ports: int, seed: int) -> None:
    made = design(hidden, intermediate, 1, 1, ports)
    layer = random_layer(made.mlp, np.random.default_rng(seed))
    ones = [LinearWeights(np.ones_like(n.values), np.zeros_like(n.scales)) for n in layer]
    stream = pack_mlp(ones, made)
    assert stream.shape == (made.stream_bytes,)
    assert stream.sum() == 3 * hidden * intermediate
    assert stream.size % (4096 * made.ports) == 0


def test_an_int4_stream_is_nibbles_scales_and_biases() -> None:
    """One port, one tile: the whole section by hand."""
    made = design(130, 3, 1, 1, ports=3, quant="w4a8", gated=False, up_bias=True)
    (up, down), section = random_layer(made.mlp, np.random.default_rng(1)), made.port_words * 16
    stream = pack_mlp([up, down], made)
    assert (made.gate_up.tile, made.gate_up.tiles, made.gate_up.head_words, made.gate_up.channel_words) == (4, 1, 2, 8)
    assert not stream[section:].any()
    np.testing.assert_array_equal(stream[:12].view("<f2"), up.scales.reshape(-1))
    assert up.bias is not None
    np.testing.assert_array_equal(stream[16:28].view("<f4"), up.bias)
    row = stream[32 : 32 + 3 * 128].reshape(3, 8, 16).view(np.int8)
    values = np.concatenate([(row << 4) >> 4, row >> 4], axis=2).reshape(3, 256)
    np.testing.assert_array_equal(values, up.values)


def test_weights_of_another_shape_are_refused() -> None:
    made = DESIGNS["example"]
    layer = random_layer(replace(made.mlp, intermediate=351), np.random.default_rng(0))
    with pytest.raises(UserError, match=r"gate.values is int8 \[351, 128\]; the design expects int8 \[352, 128\]"):
        pack_mlp(layer, made)
    biased = random_layer(replace(made.mlp, down_bias=True), np.random.default_rng(0))
    with pytest.raises(UserError, match="down has a bias; the design expects none"):
        pack_mlp(biased, made)
    with pytest.raises(UserError, match="2 linears were given; the design takes gate, up, down"):
        pack_mlp(layer[1:], made)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(LINEARS),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    inputs=st.integers(1, 300),
    biased=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_a_linear_puts_every_value_where_the_kernel_reads_it(
    name: str, sizes: list[int], inputs: int, biased: bool, seed: int
) -> None:
    made, rng = DESIGNS[name], np.random.default_rng(seed)
    product = made.fit(LinearSpec("any", inputs, sum(sizes), biased))
    weights = Linear.random(made, product, rng).weights
    cuts = np.cumsum(sizes)[:-1]
    biases = [None] * len(sizes) if weights.bias is None else np.split(weights.bias, cuts)
    parts = zip(np.split(weights.values, cuts), np.split(weights.scales, cuts), biases, strict=True)
    stream = pack_linear([LinearWeights(*part) for part in parts], product)
    assert stream.shape == (product.stream_bytes,)
    sections = stream.reshape(product.ports, -1)
    used = 16 * (product.head_words + product.tile_words)
    assert not sections[:, product.tiles * used :].any()
    for channel in range(product.channels):
        row, port = divmod(channel, product.ports)
        t, j = divmod(row, product.tile)
        tile = sections[port, t * used : (t + 1) * used]
        scales = tile[: 16 * product.scale_words].view(weights.scales.dtype)[: product.tile * product.sums]
        np.testing.assert_array_equal(scales.reshape(product.tile, -1)[j], weights.scales[channel].reshape(-1))
        if weights.bias is not None:
            assert tile[16 * product.scale_words + 4 * j :][:4].view("<f4")[0] == weights.bias[channel]
        row = tile[16 * product.head_words :].reshape(product.tile, -1, 16)[j].view(np.int8)
        if product.bits == 4:  # of a word's 32 values, the first 16 are the low nibbles
            row = np.stack([np.left_shift(row, 4) >> 4, row >> 4], axis=1)
        np.testing.assert_array_equal(row.reshape(-1)[:inputs], weights.values[channel, :inputs])
        assert not row.reshape(-1)[inputs:].any()


def test_wrong_linears_are_refused() -> None:
    product = replace(design(128, 352, 2, 2, linears=EXAMPLE).linears["layer_0.qkv"], bias=True)
    values, scales, bias = np.zeros((128, 128), np.int8), np.zeros(128, np.float32), np.zeros(128, np.float32)
    for linear, text in (
        (LinearWeights(values[:, :127], scales, bias), r"linear 0.values is int8 \[128, 127\]; the design expects"),
        (LinearWeights(values, scales.astype(np.float64), bias), r"linear 0.scales is float64 \[128\]; the design"),
        (LinearWeights(values, scales), "linear 0 has no bias; the design expects one"),
        (LinearWeights(values, scales, bias), "the linears have 128 channels in all; the design expects 384"),
    ):
        with pytest.raises(UserError, match=text):
            pack_linear([linear], product)


def test_every_argument_has_its_pragmas(tmp_path: Path) -> None:
    made = DESIGNS["example"]
    emit_hls(made, tmp_path)
    for kernel in (engine_interface(made, ControlSizes(100)), drs_interface(ControlSizes(100))):
        text = (tmp_path / f"{kernel.name}.cpp").read_text()
        for name in [*(p.name for p in kernel.ports), "return"]:
            assert re.search(rf"#pragma HLS INTERFACE mode=s_axilite port={name} bundle=control\n", text), name
        for port in kernel.ports:
            memory = re.search(rf"mode=m_axi port={port.name} bundle={port.bundle} ", text)
            assert (memory is not None) == (port.mode == "m_axi")


def test_configurations_name_part_clock_and_memories(tmp_path: Path) -> None:
    emit_hls(DESIGNS["example"], tmp_path, board=load_target("zcu102"))
    config = (tmp_path / "fastcar_engine_hls_config.cfg").read_text()
    assert "part=xczu9eg-ffvb1156-2-e\n" in config
    assert "clock=250MHz\n" in config
    assert "tb.file=engine_testbench.cpp\n" in config
    drs_config = (tmp_path / "fastcar_drs_hls_config.cfg").read_text()
    assert "syn.top=fastcar_drs\n" in drs_config
    assert "tb.file=drs_testbench.cpp\n" in drs_config
    link = (tmp_path / "link.cfg").read_text().splitlines()
    assert "nk=fastcar_engine:1:fastcar_engine_1" in link
    assert "sp=fastcar_engine_1.weights_3:HPC0" in link
    assert not [line for line in link if "fastcar_drs" in line]


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


TYPES = {
    "ap_int.h": r"\bap_u?int<",
    "hls_stream.h": r"\bhls::",
    "stdint.h": r"\bu?int\d+_t\b",
    "string.h": r"\bmem(cpy|set|cmp)\b",
}
"""Header that precompiling brings along -> what needs it."""


def included(name: str) -> set[str]:
    """Everything that a header of the templates includes, also through others."""
    found = set(re.findall(r'^#include [<"]([^>"]+)[>"]', (files("hls_templates") / name).read_text(), re.MULTILINE))
    return found.union(*(included(inner) for inner in found if inner in HEADERS))


def test_headers_compile_alone(csim_tools: None, precompiled: Precompiled, tmp_path: Path) -> None:
    assert {"fastcar_drs.hpp", "fastcar_engine_processes.hpp", "fastcar_probe.hpp"} <= set(HEADERS)
    types = precompiled(["-std=c++14", *WARNINGS, "-isystem", str(ap_types_folder())])
    done = check_syntax("g++", including(HEADERS, tmp_path), f"-I{files('hls_templates')}", *types)
    assert done.returncode == 0, done.stderr
    needed = {(h, t) for h in HEADERS for t in TYPES if re.search(TYPES[t], (files("hls_templates") / h).read_text())}
    assert {t for _, t in needed} == set(TYPES)
    assert [(h, t) for h, t in sorted(needed) if t not in included(h)] == []


def test_every_emitted_source_compiles_by_clang(
    csim_tools: None, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    """By g++ the tests build every source, with the same warnings as errors; and by clang the test benches, with the
    kernels."""
    require_tool("clang++")
    sources = {path.name for path in emit_hls(DESIGNS["int4"], tmp_path) if path.suffix == ".cpp"}
    kernels = {f"fastcar_{name}.cpp" for name in ("engine", "drs", "probe")}
    assert sources - kernels == {"engine_testbench.cpp", "drs_testbench.cpp", "probe_testbench.cpp", "fastcar_csim.cpp"}
    done = check_syntax("clang++", [tmp_path / "fastcar_csim.cpp", tmp_path / "fastcar_engine.cpp"])
    assert done.returncode == 0, done.stderr


def test_headers_compile_without_pragmas(csim_tools: None, tmp_path: Path) -> None:
    sources = including(["fastcar_engine_processes.hpp", "fastcar_drs.hpp"], tmp_path)
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


def fast_build(folder: Path, cxx: str, precompiled: Precompiled) -> list[str]:
    """What `make` gets to build with this compiler in half the time: the project's own CXXFLAGS without optimisation,
    and for g++ precompiled types."""
    (flags,) = re.findall(r"^CXXFLAGS := (.*)$", (folder / "Makefile").read_text(), re.MULTILINE)
    assert "-O2" in flags
    types, (name, *options), flags = str(ap_types_folder()), cxx.split(), flags.replace("-O2", "-O0")
    options += precompiled([*options, *flags.split(), "-isystem", types]) if name == "g++" else []
    return [f"CXX={' '.join([name, *options])}", f"CXXFLAGS={flags}", f"AP_TYPES={types}"]


@pytest.mark.parametrize(
    ("design_name", "cxx"),
    [
        ("int4", f"g++ {SANITIZED}"),
        ("tails", "clang++"),
        ("one_port_many_tiles", "g++ -DFASTCAR_WORD_BY_RANGE"),
    ],
    ids=["sanitized", "clang", "ranges"],
)
def test_test_bench_passes(
    csim_tools: None,
    require_tool: Callable[[str], str],
    precompiled: Precompiled,
    design_name: str,
    cxx: str,
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
    assert "PASS: DRS, " in done.stdout
    assert "PASS: MLP, " in done.stdout
    assert "linears, " not in done.stdout


def test_the_bench_of_linears_passes(
    csim_tools: None, require_tool: Callable[[str], str], precompiled: Precompiled, tmp_path: Path
) -> None:
    """The engine's, under the sanitizers. The other benches know nothing of linears."""
    require_tool("make")
    emit_hls(DESIGNS["linears"], tmp_path)
    built = run("make", "build/engine_testbench", *fast_build(tmp_path, f"g++ {SANITIZED}", precompiled), cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    done = run("build/engine_testbench", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: linears, 2 shape(s), 0 mismatch(es)" in done.stdout


@pytest.mark.parametrize(
    ("header", "right", "wrong", "bench"),
    [
        ("fastcar_numerics.hpp", "rest > 0.5f", "rest > 0.75f", "engine_testbench"),
        ("fastcar_engine_core.hpp", "covered - chunk < channels", "covered < channels", "engine_testbench"),
        (
            "fastcar_tile.hpp",
            "scale_words + now.row / FLOAT_LANES",
            "scale_words + now.row / HALF_LANES",
            "engine_testbench",
        ),
        ("fastcar_drs.hpp", "return index_register != 0;", "return index_register > 1;", "drs_testbench"),
    ],
    ids=["rounding", "refusals", "bias", "drs"],
)
def test_test_benches_find_a_wrong_kernel(
    csim_tools: None,
    require_tool: Callable[[str], str],
    precompiled: Precompiled,
    header: str,
    right: str,
    wrong: str,
    bench: str,
    tmp_path: Path,
) -> None:
    """The mutations compile without a warning."""
    require_tool("make")
    emit_hls(DESIGNS["linears_int4"], tmp_path)
    text = (tmp_path / header).read_text()
    assert text.count(right) == 1
    (tmp_path / header).write_text(text.replace(right, wrong))
    built = run("make", f"build/{bench}", *fast_build(tmp_path, "g++", precompiled), cwd=tmp_path)
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
