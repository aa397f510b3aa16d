"""Libraries as files: same bytes, loaded in a fresh process, and clear errors."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Never

import numpy as np
import pytest
import torch
import tvm
from safetensors.torch import save_file
from torch import fx, nn
from tvm import relax

import fastcar_compile.runtime.backends.hls_csim  # noqa: F401  registers the packed function that offloaded MLPs call
from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.codegen.tvm import build
from fastcar_compile.codegen.tvm.build import HostGraph, lower
from fastcar_compile.codegen.tvm.converters import CONVERTERS
from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import PORTABLE
from fastcar_compile.errors import BackendError, CompileError
from fastcar_compile.gates.base import GateInputs
from fastcar_compile.ir.ops.offload import GateDecision, bound_accelerator, bound_gate_unit
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.query import output_nodes
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.runtime.backends.accelerator.calls import stepping
from fastcar_compile.runtime.backends.cpu import CpuStepper, Library
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.tvm_runtime import adopt

from .programs import FRAME, LAYERS, Case, cpu_backend, export, numpy_params, program, tokens

FRESH = """
import json, sys
import numpy as np
from safetensors.numpy import load_file
from fastcar_compile.artifact.sections import DecoderSection, ProgramsPart
from fastcar_compile.runtime.backends.cpu import CpuStepper, Library
from pathlib import Path
folder = Path(sys.argv[1])
decoder = DecoderSection.model_validate_json((folder / "decoder.json").read_text())
programs = ProgramsPart.model_validate_json((folder / "programs.json").read_text())
library = Library((folder / "decoder.so").read_bytes(), programs)
backend = CpuStepper(library, decoder, load_file(folder / "weights.safetensors"), threads=1)
limits = np.zeros(decoder.config.num_layers, np.float32)
logits = [backend.decode(t, i, i, limits).logits for i, t in enumerate(np.load(folder / "tokens.npy"))]
np.save(folder / "logits.npy", np.stack(logits))
"""


def _python(code: str, folder: Path) -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", code, str(folder)]
    environment = {"PYTHONPATH": f"{tests}:{tests.parent}", "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "17"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr


def test_a_fresh_process_needs_files_only(tmp_path: Path) -> None:
    case = Case()
    library = export(case, tmp_path)
    source = program(case)
    save_file({n: t.contiguous().clone() for n, t in source.params.items()}, tmp_path / "weights.safetensors")
    (tmp_path / "decoder.json").write_text(decoder_section(source).model_dump_json())
    (tmp_path / "programs.json").write_text(library.programs.model_dump_json())
    np.save(tmp_path / "tokens.npy", tokens(case, 2 * FRAME))
    _python(FRESH, tmp_path)
    backend, limits = cpu_backend(case, library), np.zeros(LAYERS, np.float32)
    expected = [backend.decode(t, i, i, limits).logits for i, t in enumerate(tokens(case, 2 * FRAME))]
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), np.stack(expected))


@dataclass(frozen=True)
class Bound:
    """An accelerator of functions over tensors, for the library."""

    accelerator: Callable[..., torch.Tensor]
    unit: Callable[..., GateDecision]
    step: int

    def mlp(self, layer: int, x: np.ndarray, replay: np.ndarray, cached: np.ndarray) -> np.ndarray:
        """As Offloaded.mlp."""
        return self.accelerator(layer, *map(torch.tensor, (x, replay, cached))).numpy()

    def gate(
        self, layer: int, inputs: GateInputs[np.ndarray], chain: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As Offloaded.gate."""
        given = GateInputs(*(None if v is None else torch.tensor(v) for v in vars(inputs).values()))
        found = self.unit(layer, given, torch.tensor(chain), self.step)
        return found.replay.numpy(), found.score.numpy(), found.chain.numpy()

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """There is none."""
        raise AssertionError(name)


def test_offloaded_gates_and_mlps_reach_the_accelerator(tmp_path: Path) -> None:
    """The host program hands q and the key to one packed function and follows what it decides: every computing row goes
    to the other one, and none when all rows replay."""
    case = Case(quant="w8a8", thresholds=(0.0, None, 0.0))
    host = copy.deepcopy(program(case))
    run_pipeline(host, offload_pipeline())
    graph = HostGraph(host.graph_module, host.outputs)
    module = lower({"decode": graph, "offload": graph})
    module.export(tmp_path / "decoder.so")
    calls: list[int] = []
    gates: list[tuple[int, int]] = []

    def accelerator(layer: int, x: torch.Tensor, replay: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        calls.append(layer)
        return torch.where(replay[:, None], cached, torch.tanh(x) * (layer + 1))

    def unit(layer: int, inputs: GateInputs[torch.Tensor], chain: torch.Tensor, step: int) -> GateDecision:
        gates.append((layer, step))
        replay = torch.full((case.batch,), step >= FRAME)
        assert inputs.query is not None
        assert inputs.key is not None
        assert inputs.x is None
        return GateDecision(replay, inputs.query.sum((1, 2)) * inputs.key.sum((1, 2)), chain + 1)

    library = Library((tmp_path / "decoder.so").read_bytes(), module.part("decoder.so"))
    backend = CpuStepper(library, decoder_section(host), numpy_params(host), threads=1, decode="offload")
    eager = EagerStepper(host.graph_module, host.outputs, None, [], host.state, 0)
    limits = np.full(LAYERS, np.inf, np.float32)  # not read: the unit has its own
    for i, token in enumerate(tokens(case, 2 * FRAME)):
        calls.clear()
        gates.clear()
        bound = Bound(accelerator, unit, i)
        with bound_accelerator(accelerator), bound_gate_unit(unit), stepping(bound):
            actual = backend.decode(token, i, i, limits)
            assert calls == ([0, 1, 2] if i < FRAME else [1])
            assert gates == [(0, i), (2, i)]
            expected = eager.decode(token, i, i, limits)
            np.testing.assert_allclose(actual.logits, expected.logits, atol=5e-2)
            np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-2, atol=1e-2)
            replay = [i >= FRAME] * 2
            assert actual.decisions.tolist() == expected.decisions.tolist() == [replay, [False] * 2, replay]


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
    with pytest.raises(BackendError, match=r"parameters that are not given: .*lm_head"):
        cpu_backend(Case(), library, params)
    with pytest.raises(BackendError, match="cannot be loaded"):
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


@pytest.mark.parametrize("offload", [None, "linears"])
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
    assert len(few["Function"]) == 6  # entry, prologue, layer and its two branches, epilogue
