"""The exported decoder: names, `If` per replayable layer, deterministic bytes, MLP really skipped."""

import copy
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
from decoders import SIZES, llama, rewritten
from onnx import numpy_helper

from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.codegen.onnx.export import export_onnx
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import BackendError, CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import offload_pipeline
from fastcar_compile.runtime.backends.ort import OnnxModel, OrtStepper
from fastcar_compile.support.packages import release

FRAME, LENGTH = 4, 17


@cache
def program(quant: str = "none", thresholds: tuple[float | None, ...] = (0.0, None)) -> DecoderProgram:
    return rewritten(
        llama(num_hidden_layers=len(thresholds)), chunk=0, tokens_per_frame=FRAME, max_seq_len=LENGTH, quant=quant,
        replay=ReplayConfig(threshold=thresholds),
    )  # fmt: skip


def test_names_if_and_state(tmp_path: Path) -> None:
    source = program()
    export_onnx(source, tmp_path / "decoder.onnx")
    graph = onnx.load(tmp_path / "decoder.onnx").graph
    assert [i.name for i in graph.input] == source.inputs
    states = [spec.name for spec in source.state]
    assert [o.name for o in graph.output] == [f"{n}_out" if n in states else n for n in source.outputs]
    assert "mlp_cache_0_out" in {o.name for o in graph.output}
    inlined = onnx.inliner.inline_local_functions(onnx.load(tmp_path / "decoder.onnx"))
    assert [n.op_type for n in inlined.graph.node].count("If") == 1  # layer 1 never replays


def test_a_viewer_finds_modules_source_lines_and_passes(tmp_path: Path) -> None:
    export_onnx(program("w8a8", (0.0, 0.0)), tmp_path / "decoder.onnx")
    model = onnx.load(tmp_path / "decoder.onnx")
    assert [(n.op_type, n.name) for n in model.graph.node] == [
        ("prologue", "prologue"),
        ("layer", "model.layers.0"),
        ("layer", "model.layers.1"),
        ("epilogue", "epilogue"),
    ]
    assert "insert-replay" in model.graph.node[1].doc_string
    layer = next(f for f in model.functions if f.name == "layer")
    notes = {n.name: {p.key: p.value for p in n.metadata_props} for n in layer.node}
    linear = notes["self_attn.k_proj/linear_w8a8"]
    assert linear["source"].startswith("transformers/models/llama/modeling_llama.py:")
    assert (linear["module"], linear["made_by"]) == ("self_attn.k_proj", "quantize-w8a8")
    assert notes["self_attn.k_proj/linear_w8a8/MatMulInteger"] == linear
    assert "made_by" not in notes["self_attn/neg"], "an operator of the model"
    branches = next(n for n in layer.node if n.op_type == "If").attribute
    inner = {n.name for a in branches if a.name == "else_branch" for n in a.g.node}
    assert "mlp.down_proj/linear_w8a8" in inner
    operators = [n for n in layer.node if n.op_type not in ("Constant", "Identity")]
    assert sum(not n.metadata_props for n in operators) <= len(operators) // 20, "next to all have an origin"
    assert "layer_self_attn_q_proj_weight_int8" in layer.input
    assert "layer_mlp_cache" in layer.input


def test_metadata_of_the_model(tmp_path: Path) -> None:
    export_onnx(program(), tmp_path / "decoder.onnx")
    model = onnx.load(tmp_path / "decoder.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert (model.producer_name, model.producer_version) == ("fastcar_compile", release())
    sizes = {p.key: p.value for p in model.metadata_props}
    assert (sizes["tokens_per_frame"], sizes["num_layers"]) == (str(FRAME), "2")
    values = {v.name: v.doc_string for v in (*model.graph.input, *model.graph.output)}
    assert values["key_cache_1"] == "state: key cache of layer 1"
    assert values["mlp_cache_0_out"] == "state: mlp cache of layer 0, updated"
    assert all(values.values()), "every input and output has a note"


def test_bodies_do_not_grow_with_the_layers(tmp_path: Path) -> None:
    counts = []
    for layers in (2, 3):
        export_onnx(program("w8a8", (0.0,) * layers), tmp_path / "decoder.onnx")
        model = onnx.load(tmp_path / "decoder.onnx")
        counts.append({f.name: len(f.node) for f in model.functions})
        assert [n.op_type for n in model.graph.node].count("layer") == layers
    few, many = counts
    grown = {name for name in few if few[name] != many[name]}
    assert few.keys() == many.keys()
    assert grown == {"prologue"}  # a threshold per layer


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
    backend = OrtStepper(OnnxModel(path.name, path.read_bytes()), decoder_section(source), 1)
    token = np.zeros((1, 1), np.int64)
    replaying = backend.decode(token, 9, 8, np.full(2, -np.inf, np.float32))
    assert replaying.decisions.all()
    assert np.isfinite(replaying.logits).all()
    computing = backend.decode(token, 10, 9, np.full(2, np.inf, np.float32))
    assert not np.isfinite(computing.logits).any()


def test_operator_without_translation_is_named(tmp_path: Path) -> None:
    source = copy.deepcopy(program("w8a8"))
    run_pipeline(source, offload_pipeline())
    with pytest.raises(CompileError, match=r"cannot be exported to ONNX.*offloaded_mlp") as caught:
        export_onnx(source, tmp_path / "decoder.onnx")
    assert "modeling_llama.py:" in str(caught.value)
    assert not (tmp_path / "decoder.onnx").exists()


def test_damaged_model_is_a_clear_error() -> None:
    with pytest.raises(BackendError, match=r"(?s)onnxruntime cannot load the model.*decoder\.onnx"):
        OrtStepper(OnnxModel("decoder.onnx", b"not a model"), decoder_section(program()), 1)
