"""The exported decoder: names, `If` per replayable layer, deterministic bytes, MLP really skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
from decoders import SIZES, llama
from onnx import numpy_helper

from fastcar_compile.codegen.onnx.export import export_onnx
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.errors import BackendError, CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.program_json import decoder_section
from fastcar_compile.passes.pipeline import analysis_pipeline, offload_pipeline, rewrite_pipeline
from fastcar_compile.runtime.backends.ort import OrtStepper

FRAME, LENGTH = 4, 17


def program(quant: str = "none", thresholds: tuple[float | None, ...] = (0.0, None)) -> DecoderProgram:
    model = llama(num_hidden_layers=len(thresholds))
    captured = capture(model, batch_size=1, max_seq_len=LENGTH, tokens_per_frame=FRAME, prefill_chunk=0)
    run_pipeline(captured, analysis_pipeline())
    config = CompileConfig(
        target="cpu",
        tokens_per_frame=FRAME,
        max_seq_len=LENGTH,
        batch_size=1,
        quant=quant,
        replay=ReplayConfig(threshold=thresholds),
        prefill_chunk=1,
    )
    return run_pipeline(captured, rewrite_pipeline(config, len(thresholds)))


def test_names_if_and_state(tmp_path: Path) -> None:
    source = program()
    export_onnx(source, tmp_path / "decoder.onnx")
    graph = onnx.load(tmp_path / "decoder.onnx").graph
    assert [i.name for i in graph.input] == source.inputs
    states = source.state_names()
    assert [o.name for o in graph.output] == [f"{n}_out" if n in states else n for n in source.outputs]
    assert "mlp_cache_0_out" in {o.name for o in graph.output}
    inlined = onnx.inliner.inline_local_functions(onnx.load(tmp_path / "decoder.onnx"))
    assert [n.op_type for n in inlined.graph.node].count("If") == 1  # layer 1 never replays


def test_bodies_do_not_grow_with_the_layers(tmp_path: Path) -> None:
    counts = []
    for layers in (2, 5):
        export_onnx(program("w8a8", (0.0,) * layers), tmp_path / "decoder.onnx")
        model = onnx.load(tmp_path / "decoder.onnx")
        counts.append({f.name: len(f.node) for f in model.functions})
        assert [n.op_type for n in model.graph.node].count("segment_1") == layers
    few, many = counts
    grown = {name for name in few if few[name] != many[name]}
    assert few.keys() == many.keys()
    assert grown == {"segment_0"}  # a threshold per layer


@pytest.mark.parametrize("quant", ["w4a8"])
def test_same_program_same_bytes_and_no_local_paths(tmp_path: Path, quant: str) -> None:
    for name in ("a.onnx", "b.onnx"):
        export_onnx(program(quant), tmp_path / name)
    data = (tmp_path / "a.onnx").read_bytes()
    assert data == (tmp_path / "b.onnx").read_bytes()
    for text in (str(Path(__file__).parents[2]), str(tmp_path), "site-packages", "stack_trace"):
        assert text.encode() not in data


def test_mlp_is_skipped_when_every_row_replays(tmp_path: Path) -> None:
    """With NaN in every MLP weight a replaying step stays finite; a computing one does not."""
    source, path = program(thresholds=(0.0, 0.0)), tmp_path / "decoder.onnx"
    export_onnx(source, path)
    model = onnx.load(path)
    poisoned = 0
    for tensor in model.graph.initializer:
        if SIZES["intermediate_size"] in tensor.dims:
            array = np.full_like(numpy_helper.to_array(tensor), np.nan)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
            poisoned += 1
    assert poisoned == 6
    onnx.save(model, path)
    backend = OrtStepper(path, decoder_section(source), 1)
    token = np.zeros((1, 1), np.int64)
    replaying = backend.decode(token, 9, 8, np.full(2, -np.inf, np.float32))
    assert replaying.decisions.all()
    assert np.isfinite(replaying.logits).all()
    computing = backend.decode(token, 10, 9, np.full(2, np.inf, np.float32))
    assert not np.isfinite(computing.logits).any()


def test_operator_without_translation_is_named(tmp_path: Path) -> None:
    source = program("w8a8")
    run_pipeline(source, offload_pipeline())
    with pytest.raises(CompileError, match=r"cannot be exported to ONNX.*offloaded_mlp") as caught:
        export_onnx(source, tmp_path / "decoder.onnx")
    assert "modeling_llama.py:" in str(caught.value)
    assert not (tmp_path / "decoder.onnx").exists()


def test_damaged_model_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "decoder.onnx").write_bytes(b"not a model")
    with pytest.raises(BackendError, match=r"onnxruntime cannot load the model.*decoder\.onnx"):
        OrtStepper(tmp_path / "decoder.onnx", decoder_section(program()), 1)
