"""The emitted engine: choice of the design, packing, lint of the sources, test bench and error texts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.codegen.hls.csim import ap_types_folder
from fastcar_compile.codegen.hls.emit import emit_hls
from fastcar_compile.codegen.hls.engine_design import choose_engine
from fastcar_compile.codegen.hls.engine_interface import engine_interface
from fastcar_compile.codegen.hls.linear_spec import EngineSpec, LinearSpec
from fastcar_compile.codegen.hls.linear_weights import pack_linear
from fastcar_compile.codegen.hls.spec import MlpSpec
from fastcar_compile.codegen.hls.weights import LinearWeights
from fastcar_compile.errors import CompileError, UserError
from hls import lint
from hls.library import zcu102
from hls.linear_library import ENGINES, Linear, engine

LLAMA_7B = MlpSpec(hidden=4096, intermediate=11008, batch=2, layers=32, cores=2)
LLAMA_7B_LINEARS = (("layer_0.qkv", 4096, 12288, False), ("layer_0.o", 4096, 4096, False), ("head", 4096, 32000, False))
FLAGS = "-std=c++14 -O0 -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -Werror -Wno-unknown-pragmas"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all"
NOT_SYNTHESISED = {
    "csim_entry.cpp", "csim_drs_entry.cpp", "engine_csim_entry.cpp", "testbench.cpp", "engine_testbench.cpp",
    "drs_testbench.cpp", "fastcar_csim.hpp", "fastcar_reference.hpp",
}  # fmt: skip
STREAM_FILES = {"fastcar_engine.cpp", "fastcar_engine_processes.hpp", "fastcar_mlp_processes.hpp"}


@pytest.fixture(params=sorted(ENGINES))
def name(request: pytest.FixtureRequest) -> str:
    """The name of each engine in turn."""
    return request.param


@pytest.fixture
def project(name: str, tmp_path: Path) -> dict[str, str]:
    """Name -> text of every emitted file of ENGINES[name]."""
    return {path.name: path.read_text() for path in emit_hls(ENGINES[name], tmp_path)}


SIZES = st.tuples(st.integers(1, 9000), st.integers(1, 40_000), st.booleans())


@settings(deadline=None, max_examples=60)
@given(hidden=st.integers(1, 5000), intermediate=st.integers(1, 9000), ports=st.integers(3, 12), sizes=SIZES)
def test_designs_keep_their_budget_and_cover_every_channel(
    hidden: int, intermediate: int, ports: int, sizes: tuple[int, int, bool]
) -> None:
    mlp = MlpSpec(hidden=hidden, intermediate=intermediate, batch=2, layers=1, cores=2)
    made, budget = engine(mlp, ("a", *sizes), ports=ports), zcu102(ports)
    assert not made.usage.over(budget.lut, budget.ff, budget.dsp, budget.bram36, budget.uram)
    for stage in (made.mlp.gate_up, made.mlp.down, made.linears["a"]):
        assert (stage.tiles - 1) * stage.tile * stage.ports < stage.channels <= stage.tiles * stage.tile * stage.ports
        assert stage.tile * stage.ports % 4 == 0
        assert stage.inputs <= made.max_inputs
        assert stage.tile_words <= made.max_tile_words
        assert stage.head_words <= made.max_head_words
    again = made.fit(LinearSpec("a", *sizes))
    assert again.tile_words <= made.max_tile_words
    assert again.tiles * again.tile * again.ports >= sizes[1]


def test_seven_billion_parameters_fit_zcu102() -> None:
    """Buffers are those of the widest use, down's 11008 inputs; the lanes are the MLP kernel's."""
    made = engine(LLAMA_7B, *LLAMA_7B_LINEARS)
    assert (made.mlp.ports, made.mlp.lanes) == (4, 128)
    assert made.max_inputs == 11008
    assert made.usage.bram36 <= 912 * 80 // 100
    head = made.linears["head"]
    assert 32000 * (4096 + 4) <= head.stream_bytes <= 32000 * (4096 + 16) + 4 * 4096
    assert json.loads(json.dumps(made.to_json()))["linear_stream_bytes"]["head"] == head.stream_bytes
    # Memory-bound: a port gives a word per clock, and everything else adds less than a tenth.
    assert head.port_words <= made.cycles("head") <= 1.1 * head.port_words


def test_wider_linears_than_the_mlp_widen_the_buffers() -> None:
    mlp = MlpSpec(hidden=64, intermediate=96, batch=2, layers=1, cores=2)
    narrow, wide = engine(mlp, ("o", 64, 64, False)), engine(mlp, ("o", 20_000, 64, False))
    assert (narrow.max_inputs, wide.max_inputs) == (96, 20_000)
    assert wide.usage.bram36 > narrow.usage.bram36
    assert wide.usage.dsp == narrow.usage.dsp


def test_what_does_not_fit_is_told_in_numbers() -> None:
    mlp = MlpSpec(hidden=64, intermediate=96, batch=2, layers=1, cores=2)
    spec = EngineSpec(mlp, (LinearSpec("layer_0.o", 60_000, 64), LinearSpec("head", 64, 8)))
    text = r"MLP of 64 / 96 and linears of up to 60000 inputs \(layer_0.o\).*does not fit xczu9eg.*BRAM36 \d+ of 100"
    with pytest.raises(CompileError, match=text):
        choose_engine(spec, replace(zcu102(), bram36=100))
    with pytest.raises(CompileError, match=r"has 2 memory port.s. of 128 bits; the engine needs 3 of 128"):
        choose_engine(spec, zcu102(2))
    wide = EngineSpec(mlp, (LinearSpec("a", 1 << 17, 3), LinearSpec("b", 3, 1 << 19)))
    with pytest.raises(CompileError, match=r"65536 inputs and 262144 channels: a is 131072 -> 3; b is 3 -> 524288"):
        choose_engine(wide, zcu102())


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(ENGINES)),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    inputs=st.integers(1, 300),
    biased=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_puts_every_value_where_the_kernel_reads_it(
    name: str, sizes: list[int], inputs: int, biased: bool, seed: int
) -> None:
    design, rng = ENGINES[name], np.random.default_rng(seed)
    stage = design.fit(LinearSpec("any", inputs, sum(sizes), biased))
    weights = Linear.random(design, stage, rng).weights
    cuts = np.cumsum(sizes)[:-1]
    biases = [None] * len(sizes) if weights.bias is None else np.split(weights.bias, cuts)
    parts = zip(np.split(weights.values, cuts), np.split(weights.scales, cuts), biases, strict=True)
    stream = pack_linear([LinearWeights(*part) for part in parts], stage)
    assert stream.shape == (stage.stream_bytes,)
    sections = stream.reshape(stage.ports, -1)
    used = 16 * (stage.head_words + stage.tile_words)
    assert not sections[:, stage.tiles * used :].any()
    for channel in range(stage.channels):
        port, j, t = channel % stage.ports, channel // stage.ports % stage.tile, channel // stage.ports // stage.tile
        tile = sections[port, t * used : (t + 1) * used]
        scales = tile[: 16 * stage.scale_words].view(weights.scales.dtype)[: stage.tile * stage.sums]
        np.testing.assert_array_equal(scales.reshape(stage.tile, -1)[j], weights.scales[channel].reshape(-1))
        if weights.bias is not None:
            assert tile[16 * stage.scale_words + 4 * j :][:4].view("<f4")[0] == weights.bias[channel]
        row = tile[16 * stage.head_words :].reshape(stage.tile, -1, 16)[j].view(np.int8)
        if stage.bits == 4:  # of a word's 32 values, the first 16 are the low nibbles
            row = np.stack([np.left_shift(row, 4) >> 4, row >> 4], axis=1)
        np.testing.assert_array_equal(row.reshape(-1)[:inputs], weights.values[channel, :inputs])
        assert not row.reshape(-1)[inputs:].any()


def test_wrong_linears_are_refused() -> None:
    stage = replace(ENGINES["example"].linears["layer_0.qkv"], bias=True)
    values, scales, bias = np.zeros((128, 128), np.int8), np.zeros(128, np.float32), np.zeros(128, np.float32)
    for linear, text in (
        (LinearWeights(values[:, :127], scales, bias), r"linear 0.values is int8 \[128, 127\]; the design expects"),
        (LinearWeights(values, scales.astype(np.float64), bias), r"linear 0.scales is float64 \[128\]; the design"),
        (LinearWeights(values, scales), "linear 0 has no bias; the design expects one"),
        (LinearWeights(values, scales, bias), "the linears have 128 channels in all; the design expects 384"),
    ):
        with pytest.raises(UserError, match=text):
            pack_linear([linear], stage)


def test_sources_keep_the_rules(project: dict[str, str], name: str) -> None:
    kernels = {n: t for n, t in project.items() if n.endswith((".hpp", ".cpp")) and n not in NOT_SYNTHESISED}
    assert "fastcar_mlp.cpp" not in project
    found = []
    for file, text in kernels.items():
        findings = [*lint.find_forbidden(text), *lint.find_unbounded_loops(text), *lint.find_pragmas(file, text)]
        found += [f"{file}: {finding}" for finding in findings]
    assert found == []
    assert lint.find_recursion(list(kernels.values())) == []
    tops = ("fastcar_engine.cpp", "fastcar_drs.cpp")
    assert [lint.find_ports_without_pragma(project[top]) for top in tops] == [[], []]
    design = ENGINES[name].mlp
    sizes = {"MlpConfig::PORTS": design.ports, "MlpConfig::CORES": design.spec.cores}
    top, processes = project["fastcar_engine.cpp"], project["fastcar_engine_processes.hpp"]
    assert lint.find_shared_streams(top, processes, sizes) == []
    shared = top.replace(f"ports[{design.ports - 1}]);", "ports[0]);") if design.ports > 1 else top + top
    assert lint.find_shared_streams(shared, processes, sizes)
    cores = [project[name] for name in ("fastcar_mlp_core.hpp", "fastcar_engine_core.hpp", "fastcar_mlp_processes.hpp")]
    assert lint.find_bad_dataflow([top, processes, *cores]) == []
    swapped = processes.replace("scale_tile<S>(head, acc,", "scale_tile<S>(head, value,")
    assert lint.find_bad_dataflow([top, swapped, *cores])
    codes = {file: lint.code_of(text) for file, text in kernels.items() if file != "fastcar_pragmas.hpp"}
    assert {file for file, code in codes.items() if "stream" in code} == STREAM_FILES
    assert [finding for text in project.values() for finding in lint.find_run_specific(text)] == []


def test_one_multiplier_array_serves_every_product(project: dict[str, str]) -> None:
    """One call site each: nothing is instantiated twice in a core."""
    code = "".join(lint.code_of(text) for n, text in project.items() if n not in NOT_SYNTHESISED)
    for function in ("mac_tile", "scale_tile", "fetch_tile"):
        assert len(re.findall(rf"\b{function}<S>\(.*product.bounds\)", code)) == 1
    for function in ("engine_product", "engine_quantize", "engine_finish"):
        assert len(re.findall(rf"\b{function}<C>\(", code)) == 1


def test_interface_and_link(project: dict[str, str], name: str) -> None:
    kernel = engine_interface(ENGINES[name])
    ports = ENGINES[name].mlp.ports
    names = [*(f"weights_{p}" for p in range(ports)), "x", "cached", "y", "index_register", "prefetch", "op"]
    assert [p.name for p in kernel.ports] == [*names, "inputs", "channels", "tile", "tiles"]
    assert "syn.top=fastcar_engine\n" in project["fastcar_engine_hls_config.cfg"]
    assert "tb.file=engine_testbench.cpp\n" in project["fastcar_engine_hls_config.cfg"]
    assert "nk=fastcar_engine:1:fastcar_engine_1" in project["link.cfg"]
    assert f"sp=fastcar_engine_1.weights_{ports - 1}:HP{ports - 1}" in project["link.cfg"]


def bench(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Build the benches of an emitted project with sanitizers and run them, up to the first that fails."""
    make = [
        "make",
        "-s",
        "csim",
        f"BENCHES={' '.join(f'build/{n}' for n in names)}",
        f"AP_TYPES={ap_types_folder()}",
        f"CXXFLAGS={FLAGS} {SANITIZE}",
    ]
    return subprocess.run(make, cwd=folder, capture_output=True, text=True, check=False)


def test_test_benches_pass(csim_tools: None, require_tool: Callable[[str], str], tmp_path: Path) -> None:
    require_tool("make")
    emit_hls(ENGINES["two_rows_per_core"], tmp_path)
    done = bench(tmp_path, "testbench", "engine_testbench")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "PASS: MLP, 32 pattern(s), 0 mismatch(es)\nPASS: linears, 2 shape(s), 0 mismatch(es)\n"


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("fastcar_engine_core.hpp", "covered - chunk < channels", "covered < channels"),
        ("fastcar_mlp_core.hpp", "head[p][bounds.scale_words + j / FLOAT_LANES]", "head[p][j / FLOAT_LANES]"),
    ],
    ids=["refusals", "bias"],
)
def test_the_test_bench_finds_a_wrong_engine(
    csim_tools: None, require_tool: Callable[[str], str], header: str, right: str, wrong: str, tmp_path: Path
) -> None:
    require_tool("make")
    emit_hls(ENGINES["int4_one_port"], tmp_path)
    text = (tmp_path / header).read_text()
    assert text.count(right) == 1
    (tmp_path / header).write_text(text.replace(right, wrong))
    done = bench(tmp_path, "engine_testbench")
    assert "FAIL: linears" in done.stdout, done.stderr
