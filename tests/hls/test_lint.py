"""Rules for HLS sources (CONTRIBUTING.md), checked on the emitted text; each check also has to find a planted fault."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fastcar_compile.codegen.hls.project import emit_hls
from hls import lint
from hls.library import DESIGNS

NOT_SYNTHESISED = {"step_testbench.cpp", "fastcar_engine.cpp"}
TOPS = ("fastcar_step.cpp", "fastcar_probe.cpp")
PROBE_FILES = {"fastcar_probe.cpp", "fastcar_probe.hpp"}
AXI_PORTS = "EngineConfig::PORTS / EngineConfig::AXI_WORDS"
STREAM_FILES = {"fastcar_step.cpp", "fastcar_engine_processes.hpp"}
STEP_STREAMS = {"fastcar_attention_processes.hpp", "fastcar_step_processes.hpp", "fastcar_value_processes.hpp"}
CORES = ("fastcar_tile.hpp", "fastcar_engine_core.hpp")
"""The functions that the dataflow regions call."""


@cache
def emitted(design_name: str) -> dict[str, str]:
    """Name -> text of every emitted file of a design."""
    with TemporaryDirectory() as folder:
        return {path.name: path.read_text() for path in emit_hls(DESIGNS[design_name], Path(folder))}


BRANCHES = ("example", "linears_int4", "three_ports_in_pairs")
"""Designs that take every branch of the templates."""


@pytest.fixture(
    params=[*BRANCHES, *(pytest.param(n, marks=pytest.mark.thorough) for n in DESIGNS if n not in BRANCHES)]
)
def design_name(request: pytest.FixtureRequest) -> str:
    """A design; most of the text is the same for all of them."""
    return str(request.param)


@pytest.fixture
def project(design_name: str) -> dict[str, str]:
    """Name -> text of every emitted file of each design."""
    return dict(emitted(design_name))


def kernels_of(project: dict[str, str]) -> dict[str, str]:
    """The C++ that is synthesised."""
    return {n: t for n, t in project.items() if n.endswith((".hpp", ".cpp")) and n not in NOT_SYNTHESISED}


def stream_sizes(design_name: str) -> dict[str, int]:
    """Constants of the arrays of streams."""
    design = DESIGNS[design_name]
    return {"EngineConfig::PORTS": design.ports, AXI_PORTS: design.axi_weight_ports}


FILE_RULES = (
    *(lint.find_forbidden, lint.find_unbounded_loops, lint.find_unlabelled_loops, lint.find_initialised_uram),
    lint.find_bound_operators,
)


def findings(kernels: dict[str, str]) -> list[str]:
    """What breaks a rule for every source that is synthesised, and the rules for tops."""
    found = [f"{name}: {one}" for name, text in kernels.items() for rule in FILE_RULES for one in rule(text)]
    found += [f"{name}: {one}" for name, text in kernels.items() for one in lint.find_pragmas(name, text)]
    for top in TOPS:
        rules = (lint.find_ports_without_pragma, lint.find_unequal_bursts, lint.find_reserved_arguments)
        found += [one for rule in rules for one in rule(kernels[top])]
    return found + lint.find_recursion(list(kernels.values()))


def test_kernel_sources_are_clean(project: dict[str, str]) -> None:
    kernels = kernels_of(project)
    assert findings(kernels) == []
    defined = {name for text in kernels.values() for name, _, _ in lint.functions(lint.code_of(text))}
    assert {"fastcar_step", "compute", "mac_tile", "quantize_rows", "decide_layer"} < defined


def test_a_kernel_without_its_engine_is_clean(tmp_path: Path) -> None:
    """Its streams are arguments where it is synthesised, and no weight is read."""
    emit_hls(replace(DESIGNS["linears"], engine="rtl"), tmp_path)
    kernels = kernels_of({path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()})
    (streams,) = re.findall(r"#define FASTCAR_STREAMS (, .*)", kernels["fastcar_step.hpp"])
    top = kernels["fastcar_step.cpp"].replace(" FASTCAR_STREAMS", streams)
    assert findings(kernels | {"fastcar_step.cpp": top}) == []
    assert re.findall(r"mode=axis port=(\w+)\n", top) == ["calls", "results"]
    assert "weights_0" not in top


def test_no_floating_point_in_the_mac_array(project: dict[str, str]) -> None:
    assert lint.find_floats_below(list(kernels_of(project).values()), "mac_tile") == []


def test_dataflow_regions_are_canonical(project: dict[str, str]) -> None:
    assert lint.find_bad_dataflow([project[name] for name in (*STREAM_FILES, *CORES)]) == []


def test_streams_have_one_producer_and_one_consumer(project: dict[str, str], design_name: str) -> None:
    top, processes = project["fastcar_step.cpp"], project["fastcar_engine_processes.hpp"]
    assert lint.find_shared_streams(top, processes, stream_sizes(design_name)) == []
    top, ports = project["fastcar_probe.cpp"], DESIGNS[design_name].axi_weight_ports
    assert lint.find_shared_streams(top, project["fastcar_probe.hpp"], {str(ports): ports}) == []
    assert lint.find_bad_dataflow([top, project["fastcar_probe.hpp"]]) == []


def test_compute_cores_have_no_streams(project: dict[str, str]) -> None:
    codes = {name: lint.code_of(text) for name, text in kernels_of(project).items() if name != "fastcar_pragmas.hpp"}
    assert {name for name, code in codes.items() if "stream" in code} == STREAM_FILES | STEP_STREAMS | PROBE_FILES
    assert {name for name, code in codes.items() if "DATAFLOW" in code} == STREAM_FILES | {"fastcar_probe.cpp"}


@pytest.mark.parametrize("design_name", ["linears"])
def test_one_multiplier_array_serves_every_product(project: dict[str, str]) -> None:
    """One call site each: nothing is instantiated twice in a core."""
    code = "".join(lint.code_of(text) for text in kernels_of(project).values())
    for function in ("mac_tile", "scale_tile", "fetch_tile"):
        assert len(re.findall(rf"\b{function}<S>\(", code)) == 1
    for function in ("run_product", "run_tiles", "quantize_rows", "finish_tile"):
        assert len(re.findall(rf"\b{function}<C>\(", code)) == 1


@pytest.mark.parametrize("design_name", ["example"])
def test_sums_of_packed_products_keep_their_cascade(project: dict[str, str]) -> None:
    """A balanced tree of them would be added in the fabric, which the resource model does not count."""
    bodies = [body for text in kernels_of(project).values() for _, _, body in lint.functions(lint.code_of(text))]
    summed = [body for body in bodies if re.search(r"\+= pack_pair\(", body)]
    assert len(summed) == 1
    assert "FASTCAR_IN_ORDER" in summed[0]
    assert "HLS EXPRESSION_BALANCE off" in project["fastcar_pragmas.hpp"]


ENGINE_FILES = (
    *("fastcar_step.cpp", "fastcar_engine_processes.hpp", "fastcar_engine_core.hpp", "fastcar_tile.hpp"),
    *("fastcar_mac.hpp", "fastcar_numerics.hpp", "fastcar_word.hpp", "fastcar_mapping.hpp"),
)

STEP_FILES = (
    "fastcar_row_core.hpp",
    "fastcar_cache_core.hpp",
    "fastcar_attention_core.hpp",
    "fastcar_step_program.hpp",
)
"""Cores of a decode step outside of the array."""


def test_steps_of_pipelined_loops_declare_what_they_carry(project: dict[str, str]) -> None:
    texts = [project[name] for name in (*ENGINE_FILES[1:], *STEP_FILES)]  # the first is the top
    assert lint.find_undeclared_recurrences(texts) == []
    steps = {name for text in texts for name, _, _ in lint.functions(text) if name.endswith("_step")}
    assert {"mac_step", "scale_step", "amax_step", "quantize_step", "finish_step", "rotate_step"} <= steps


PLANTED = {
    lint.find_forbidden: ("std::vector<int> v;", '#include "other.hpp"'),
    lint.find_unbounded_loops: ("for (int i = 0; i < count; ++i) {\n    a;\n    b;\n}\n",),
    lint.find_initialised_uram: ("    static word_t tile[4];\n    FASTCAR_TILE_MEMORY(tile)\n",),
    lint.find_bound_operators: ("FASTCAR_PRAGMA(HLS BIND_OP variable = x op = mul impl = dsp)",),
    partial(lint.find_pragmas, "fastcar_tile.hpp"): ('    _Pragma("HLS UNROLL")\n', "#pragma HLS INTERFACE m_axi"),
}
"""Rule -> lines that break it."""


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule, texts in PLANTED.items() for text in texts])
def test_a_planted_fault_is_found(rule: Callable[[str], list[str]], text: str) -> None:
    assert rule(text)


def test_recursion_is_found() -> None:
    assert lint.find_recursion(["int a(int x) { return b<int>(x); }", "int b(int x) { return a(x); }"])
    assert lint.find_recursion(["int a(int x) { if (x) { a(x - 1); } }"])


def test_floating_point_below_the_root_is_found() -> None:
    below = "int dot(int q) { return int(float_of(q)); } float float_of(int q) { return static_cast<float>(q); }"
    assert lint.find_floats_below([below, "void mac_tile(int q) { dot(q); }"], "mac_tile")
    assert lint.find_floats_below([below], "mac_tile") == ["mac_tile is not there, or calls nothing"]


def test_a_loop_without_a_label_is_found() -> None:
    good = "a:\nfor (int i = 0; i < n; ++i) {\n    for (int j = 0; j < S::LANES; ++j) {\n    }\n}\n"
    assert lint.find_unlabelled_loops(good) == []
    assert lint.find_unlabelled_loops(good.replace("a:\n", "")) == ["label: for (int i = 0; i < n; ++i) {"]


def dataflow(project: dict[str, str]) -> list[str]:
    """What is not canonical in the array's regions."""
    return lint.find_bad_dataflow([project[name] for name in ("fastcar_engine_processes.hpp", *CORES)])


def streams(project: dict[str, str]) -> list[str]:
    """What is wrong with the streams of the example's top."""
    top, processes = project["fastcar_step.cpp"], project["fastcar_engine_processes.hpp"]
    return lint.find_shared_streams(top, processes, stream_sizes("example"))


def undeclared(project: dict[str, str]) -> list[str]:
    """What the loops of the engine carry and do not declare."""
    return lint.find_undeclared_recurrences([project[name] for name in ENGINE_FILES])


def ports(project: dict[str, str]) -> list[str]:
    """What is wrong with the arguments of the top."""
    top = project["fastcar_step.cpp"]
    return lint.find_ports_without_pragma(top) + lint.find_reserved_arguments(top)


REGION, WORDS = "; ++t) {\n        FASTCAR_DATAFLOW", "int words, word_t head"


@pytest.mark.parametrize(
    ("rule", "right", "wrong", "problem"),
    [
        (dataflow, "scale_tile<S>(head, acc,", "scale_tile<S>(head, value,", "acc has ['write']"),
        (dataflow, "        mac_tile<S>(tile,", "        if (rows > 0) mac_tile<S>(tile,", "control flow: if"),
        (
            dataflow,
            "        FASTCAR_DATAFLOW\n",
            "        int x = 0;\n        FASTCAR_DATAFLOW\n",
            "does not come first",
        ),
        (dataflow, "finish_steps, t, chunk,", "finish_steps, t * 2, chunk,", "finish_tile takes the expression t * 2"),
        (dataflow, f"t < tiles{REGION}", f"t < p.tiles{REGION}", "the bound p.tiles"),
        (dataflow, f"int head_words, {WORDS}", f"Product head_words, {WORDS}", "Product head_words by value"),
        (dataflow, WORDS, "int words, int a = 0, word_t head", "default arguments"),
        (undeclared, "FASTCAR_RECURRENCE(total, FASTCAR_SCALE_DISTANCE)", "", "total of scale_tile.groups"),
        (ports, 'extern "C" void', "void", "no extern"),
        (ports, "#pragma HLS INTERFACE mode=s_axilite port=entry bundle=control\n", "", "port: ('s_axilite', 'entry')"),
        *((ports, "step_report", name, f"reserved: {name}") for name in ("input", "Report")),
        (streams, "(rows_in, streamed, core_of,", "(rows_out, streamed, core_of,", "stream: "),
        (streams, "in[p].read()", "in[p].read(); in[p].write(0)", "stream: "),
    ],
)
def test_a_fault_in_the_sources_is_found(
    rule: Callable[[dict[str, str]], list[str]], right: str, wrong: str, problem: str
) -> None:
    project = emitted("example")
    assert rule(project) == []
    planted = {name: text.replace(right, wrong) for name, text in project.items()}
    assert planted != project
    assert any(problem in text for text in rule(planted)), rule(planted)


def test_unequal_bursts_are_found() -> None:
    text = emitted("example")["fastcar_step.cpp"]
    assert "gmem_y" in lint.find_unequal_bursts(re.sub("(port=outputs .*outstanding=).*", r"\g<1>9", text))
    assert "gmem_x" in lint.find_unequal_bursts(text.replace(" num_write_outstanding=8", ""))
