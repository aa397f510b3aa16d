"""offload="linears": what users are told of the shipped decoder."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensor_maps import load_tensors
from transformers import LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.codegen.hls.model.system import estimate
from fastcar_compile.codegen.hls.model.workload import design_of, workload_of
from fastcar_compile.report.page.tables import offload_lines

EXAMPLE = Path(__file__).parents[1] / "examples" / "moving_shapes"
FRAME, LAYERS = 256, 2
CALLS = [*(f"layer_{i}.{role}" for i in range(LAYERS) for role in ("qkv", "o")), "head"]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The artifact of the shipped decoder's first two layers for zcu102, two videos at once."""
    model = LlamaForCausalLM.from_pretrained(EXAMPLE / "model", local_files_only=True, dtype=torch.float32).eval()
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:LAYERS], LAYERS
    replay = fc.ReplayConfig(threshold=(0.0, -25.0))
    options = {"target": "zcu102", "tokens_per_frame": FRAME, "batch_size": 2, "replay": replay, "offload": "linears"}
    options["prefill_chunk"] = 1
    report = fc.compile(model, dry_run=True, **options)
    artifact = fc.compile(model, output=tmp_path_factory.mktemp("linears") / "artifact", **options)
    return SimpleNamespace(artifact=artifact, report=report)


def test_a_dry_run_tells_what_is_emitted(example: SimpleNamespace) -> None:
    report, manifest = example.report, example.artifact.manifest
    accelerator = manifest.accelerator
    assert (report.layers, report.state) == (manifest.layers.layers, manifest.decoder.state)
    assert (report.decoder, report.pipeline) == (manifest.decoder.config, manifest.pipeline.passes)
    found = (report.design, report.exploration, report.controller)
    assert found == (accelerator.design, accelerator.exploration, accelerator.controller)
    offloaded = {p.what: p.calls for p in report.placements if p.unit == "accelerator"}
    assert offloaded == {"MLP": LAYERS, "gate": LAYERS, "qkv": LAYERS, "o": LAYERS, "head": 1}
    work = workload_of(manifest)
    same = estimate(work, manifest.target, design=design_of(manifest, manifest.target))
    assert report.speed[0].tokens_per_second == same.tokens_per_second


def test_the_artifact_tells_what_is_offloaded(example: SimpleNamespace) -> None:
    artifact = example.artifact
    section = artifact.manifest.accelerator
    assert artifact.manifest.options.offload == section.offload == "linears"
    assert [c.name for c in section.linears] == CALLS
    streams = load_tensors(artifact.path / section.weights)
    every = LAYERS * section.design.stream_bytes + sum(section.design.linear_stream_bytes.values())
    assert {name: len(stream) for name, stream in streams.items()} == dict.fromkeys(
        section.kernels[0].weights(), every // len(section.kernels[0].weights())
    )
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["accelerator"]["linears"] == [c.model_dump(mode="json") for c in section.linears]
    offload = offload_lines(artifact.manifest)
    assert [line["name"] for line in offload] == ["MLPs of the layers", *CALLS]
    assert offload[1]["shape"] == "128 → 128 + 128 + 128"
    text = artifact.explain()
    q, k, v = (f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    assert f"offload  layer_1.qkv: {q}, {k}, {v}; 128 -> 128 + 128 + 128, one call, all rows" in text
    assert "offload  layer_1: the MLP, one call, rows by the DRS table" in text
    assert "offload  gate: the TAS unit decides from q and the cached key" in text
    assert "outside of the layers:\n  offload  head: lm_head; 128 -> 17" in text
    assert "lm_head" not in artifact.explain(layer=1)
    assert (artifact.path / "hls" / "fastcar_step.cpp").is_file()
