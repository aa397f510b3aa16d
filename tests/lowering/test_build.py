"""Libraries: what is in them, what runs when one is opened, and clear errors."""

import copy
import os
from pathlib import Path
from typing import Any, Never, cast

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from conftest import first_often
from torch import fx, nn
from tvm import relax

import fastcar_compile.runtime.backends.hls_csim  # noqa: F401  registers the packed function that offloaded MLPs call
from fastcar_compile.codegen.tvm import build
from fastcar_compile.codegen.tvm.build import HostGraph, lower
from fastcar_compile.codegen.tvm.converters import CONVERTERS
from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import PORTABLE
from fastcar_compile.codegen.tvm.pipeline import check_of
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.errors import BackendError, CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.query import output_nodes
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.runtime.backends.cpu import Library
from fastcar_compile.runtime.tvm_runtime import Machine, adopt, aligned, as_array

from .programs import FRAME, LAYERS, Case, cpu_backend, export, lowered_whole, numpy_params, program, tokens


def test_every_unsupported_operator_is_named() -> None:
    source = copy.deepcopy(program(Case()))
    graph = source.graph_module.graph
    logits = output_nodes(graph)[0]
    with graph.inserting_before(graph.output_node()):
        for op in (torch.ops.aten.lgamma.default, torch.ops.aten.cummax.default):
            node = graph.call_function(op, (logits,))
            node.meta = {"val": logits.meta["val"], "source": "decoder.py:12"}
    with pytest.raises(CompileError, match=r"(?s)2 problems.*aten\.lgamma\.default.*decoder\.py:12.*aten\.cummax"):
        lower({"decode": HostGraph(source.graph_module, source.outputs)})


@pytest.mark.parametrize(("own", "error"), [(True, AssertionError), (False, CompileError)])
def test_a_failed_assertion_is_told_as_the_model_s_only_in_tvm_s_converters(
    own: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of this package it is a defect."""

    def fails(_call: object) -> Never:
        raise AssertionError("an invariant")

    importer, add = SegmentImporter(relax.BlockBuilder(), PORTABLE), torch.ops.aten.add.Tensor
    if own:
        monkeypatch.setitem(CONVERTERS, add, fails)
    else:
        monkeypatch.delitem(CONVERTERS, add, raising=False)
        importer.update_convert_map({add.__name__: fails})
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(1)
    graph.output((graph.call_function(add, (x, x)),))
    with pytest.raises(error, match="an invariant"):
        importer.add_function(fx.GraphModule(nn.Module(), graph), "main", 0)


def test_no_library_and_a_missing_parameter(tmp_path: Path) -> None:
    library = export(Case(), tmp_path)
    params = {n: a for n, a in numpy_params(program(Case())).items() if "lm_head" not in n}
    with pytest.raises(BackendError, match=r"arguments that are not given: .*lm_head"):
        cpu_backend(Case(), library, params)
    with pytest.raises(BackendError, match=r"the library cannot be loaded(.|\n)*decoder\.so"):
        cpu_backend(Case(), Library(b"", library.programs))


def test_aligned_weights_are_not_copied() -> None:
    base = np.zeros(256, np.float32)
    start = -base.ctypes.data % 64 // 4
    aligned, shifted = base[start : start + 64], base[start + 1 : start + 65]
    assert np.from_dlpack(adopt(aligned)).ctypes.data == aligned.ctypes.data
    assert np.from_dlpack(adopt(shifted)).ctypes.data != shifted.ctypes.data
    frozen = aligned.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(np.from_dlpack(adopt(frozen)), frozen)
    brain = as_array(adopt(aligned.view(ml_dtypes.bfloat16)))
    assert (brain.dtype.name, brain.ctypes.data) == ("bfloat16", aligned.ctypes.data)


@pytest.mark.parametrize("offload", first_often(["linears", None]))
def test_what_is_lowered_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch, offload: str | None) -> None:
    """Also not for a host graph, whose calls name their layer, and not with the thresholds, one per layer."""
    monkeypatch.setattr(build, "compile_module", lambda *_: None)  # what is counted comes before

    def functions(thresholds: tuple[float, ...]) -> dict[str, list[str]]:
        host = copy.deepcopy(program(Case(quant="w8a8", thresholds=thresholds)))
        if offload is not None:
            run_pipeline(host, offload_pipeline(offload))
        module = lower({"decode": HostGraph(host.graph_module, host.outputs)}).ir_module
        whole = tvm.transform.Sequential(
            [relax.transform.LegalizeOps(), relax.transform.DeadCodeElimination(["decode"])]
        )
        names: dict[str, list[str]] = {}
        for variable, function in whole(module).functions_items():
            names.setdefault(type(function).__name__, []).append(variable.name_hint)
        return {kind: sorted(found) for kind, found in names.items()}

    few, many = functions((0.0,) * 2), functions((0.0,) * 5)
    assert few == many
    assert len(few["Function"]) == 7  # entry, prologue, layer and its two branches, epilogue, and the draw


def test_a_replayed_mlp_is_skipped(tmp_path: Path) -> None:
    """With poisoned MLP weights the logits stay finite exactly while every row replays."""
    case = Case()
    library = export(case, tmp_path)
    healthy = {name: tensor.numpy() for name, tensor in program(case).params.items()}
    poisoned = {n: np.full_like(v, np.nan) if ".mlp." in n else v for n, v in healthy.items()}
    source, victim = cpu_backend(case, library), cpu_backend(case, library, poisoned)
    inputs = tokens(case, FRAME + 1)
    for i in range(FRAME):
        source.decode(inputs[i], i, i, np.full(LAYERS, np.inf, np.float32))
    for limit, finite in ((-np.inf, True), (np.inf, False)):
        for name, value in source._state.arrays.items():
            victim._state.arrays[name][...] = value
        logits = victim.decode(inputs[FRAME], FRAME, FRAME, np.full(LAYERS, limit, np.float32)).logits
        assert np.isfinite(logits).all() == finite


def _functions(executable: Any) -> dict[str, str]:
    """Text of the virtual machine's instructions by function."""
    return dict(part.split(":\n", 1) for part in executable.as_text().split("@") if ":\n" in part)


def test_every_program_is_one_function() -> None:
    """Of a real decoder, with branches for replay; its layers make only what they hand on."""
    functions = _functions(lowered_whole(Case()).executable)
    assert set(functions) == {f"{check}{name}" for check in ("", "check_") for name in ("decode", "prefill", "draw")}
    for name in ("decode", "prefill"):
        for check in ("check_tensor_info", "match_shape"):
            assert check in functions[check_of(name)]
            assert check not in functions[name]


# What a library's path holds when it is opened is what runs, whatever the process loaded from that path before.


def write_library(path: Path, factor: float) -> None:
    """Write a library whose `run` multiplies four numbers by the factor."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(cast("Any", (4,)), "float32"))
    with builder.function("run", [x]):
        builder.emit_func_output(builder.emit(relax.op.multiply(x, relax.const(factor, "float32"))))
    steps = relax.backend.cpu_generic.get_default_pipeline(host_target())
    executable: Any = tvm.compile(builder.get(), target=host_target(), relax_pipeline=cast("Any", steps))
    executable.export_library(str(path))


def ones_by(path: Path) -> Any:
    return as_array(Machine("decode.so", path.read_bytes()).function("run")(adopt(aligned(np.ones(4, np.float32)))))


def test_a_library_in_the_place_of_another_is_the_one_that_runs(tmp_path: Path) -> None:
    path, descriptors = tmp_path / "decode.so", len(os.listdir("/proc/self/fd"))
    for factor in (2.0, 3.0, 2.0):
        write_library(path, factor)
        np.testing.assert_array_equal(ones_by(path), factor)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    first = Machine("decode.so", path.read_bytes()).function("run")
    path.unlink()
    np.testing.assert_array_equal(as_array(first(adopt(aligned(np.ones(4, np.float32))))), 2.0)
