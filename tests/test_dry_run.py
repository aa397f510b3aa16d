"""A dry run: what it finds, what it refuses, and that it writes nothing. That it tells what `compile` emits is tested
where an artifact is there: tests/test_offload_linears.py."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import PlainBlock, PlainDecoder, llama
from gates import foreign
from torch import Tensor
from torch.nn import functional as F

import fastcar_compile as fc
from fastcar_compile.artifact.sections import LayersSection
from fastcar_compile.errors import CompileError
from fastcar_compile.report.dry_run import DryRun, replay_ceiling

MODEL = Path(__file__).parents[1] / "examples" / "moving_shapes" / "model"
FRAME, LAYERS, HIDDEN, ROWS = 256, 4, 128, 2049


@pytest.fixture(scope="module")
def report() -> DryRun:
    """Of the shipped decoder for zcu102."""
    return fc.compile(MODEL, "zcu102", offload="mlp", dry_run=True)


def test_layers_are_found_with_their_source_lines(report: DryRun) -> None:
    assert [layer.module_path for layer in report.layers] == [f"model.layers.{i}.mlp" for i in range(LAYERS)]
    assert all(layer.source.startswith("transformers/models/llama/modeling_llama.py:") for layer in report.layers)
    assert all(layer.replay is not None and layer.replay.gate == "tas" for layer in report.layers)


def test_bytes_are_those_of_the_state(report: DryRun) -> None:
    cache, slots = LAYERS * ROWS * HIDDEN * 4, LAYERS * FRAME
    assert report.memory.state == {
        "key_cache": cache, "value_cache": cache, "mlp_cache": slots * HIDDEN * 4, "chain_count": slots * 4,
    }  # fmt: skip
    (bank,) = report.memory.banks
    assert bank.used == report.memory.weights + sum(report.memory.state.values())
    assert bank.fits


def test_the_speed_is_predicted_dense_and_with_replay(report: DryRun) -> None:
    assert [s.case for s in report.speed] == ["dense", "half of what may replay", "all that may replay"]
    assert [s.replay_ratio for s in report.speed] == pytest.approx([0, 1791 / 2047 / 2, 1791 / 2047])


def test_chain_and_refresh_lower_the_ceiling(report: DryRun) -> None:
    rule = fc.ReplayConfig(max_chain=3, refresh_every=4)
    config = report.options.model_copy(update={"replay": rule})
    assert replay_ceiling(config, LayersSection(layers=report.layers)) == pytest.approx(1791 / 2047 * 3 / 4 * 3 / 4)


def test_a_config_alone_is_enough_and_nothing_is_written(
    report: DryRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(MODEL / "config.json", folder)
    monkeypatch.chdir(tmp_path)
    assert fc.compile(folder, "zcu102", offload="mlp", dry_run=True).to_json() == report.to_json()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "model"]
    with pytest.raises(CompileError, match=r"the model folder has no \*.safetensors file"):
        fc.compile(folder, "zcu102")


def test_every_problem_of_the_hardware_is_listed(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 65536, "num_hidden_layers": 6, "head_dim": 64}
    config = llama().config
    config.update(sizes | {"architectures": ["LlamaForCausalLM"], "tokens_per_frame": 8})
    config.save_pretrained(tmp_path)
    found = fc.compile(tmp_path, "zcu102", offload="mlp", dry_run=True)
    assert not found.ok
    assert "the decoder does not fit the memory of zcu102" in found.problems[0].what
    assert not found.memory.banks[0].fits
    assert found.speed, "predicted as if it did fit"


class ComputedWeight(PlainBlock):
    """The down projection's weight is a product."""

    def mlp(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.down.weight * 2, self.down.bias)


class ComputedDecoder(PlainDecoder):
    block = ComputedWeight


def test_strict_refuses_every_fallback_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = fc.ReplayConfig(gate=foreign.register(monkeypatch))
    options: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "offload": "mlp", "replay": replay}
    options["output"] = tmp_path / "artifact"
    with pytest.warns(UserWarning, match="256 is assumed"), pytest.raises(CompileError) as error:
        fc.compile(ComputedDecoder(rows=300), strict=True, **options)
    text = str(error.value)
    assert "tokens_per_frame: 256 is assumed; the model's config gives none" in text
    assert "linear blocks.1 of layer 1: it is computed in float32; its weight is computed in the graph" in text
    assert "gate of layers 0, 1: the host decides; the DRS controller has no unit for gate foreign" in text
    assert len(error.value.problems) >= 4
    assert not (tmp_path / "artifact").exists()


def test_the_logger_and_the_caller_are_told_the_same_stages(caplog: pytest.LogCaptureFixture) -> None:
    told = list[str]()
    with caplog.at_level("INFO", "fastcar_compile"):
        fc.compile(PlainDecoder(), "cpu", tokens_per_frame=4, dry_run=True, progress=told.append)
    assert told[0] == "capturing the decode step"
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("fastcar_compile", "INFO", stage) for stage in told
    ]


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"target": "zcu102", "quant": "none"}, "accelerator", "the kernels are int8, and quant is 'none'"),
        ({"target": "cpu"}, None, "target cpu has no accelerator"),
    ],
)
def test_without_an_engine_the_host_computes_all(options: dict[str, Any], kind: str | None, reason: str) -> None:
    found = fc.compile(PlainDecoder(), tokens_per_frame=4, dry_run=True, **options)
    assert [f.kind for f in found.fallbacks if f.kind != "library"] == ([] if kind is None else [kind])
    (place,) = found.placements
    assert (place.unit, place.reason) == ("host", reason)
    assert (found.design, found.speed, found.ok) == (None, (), True)


def test_an_exported_program_has_no_prefill() -> None:
    arguments = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "cache_position": torch.zeros(1, dtype=torch.int64)}
    exported = torch.export.export(PlainDecoder().eval(), (), arguments)
    found = fc.compile(exported, "cpu", tokens_per_frame=4, max_seq_len=33, dry_run=True)
    (fallback,) = found.fallbacks
    assert (fallback.kind, fallback.instead) == ("prompt", "it goes through the decode step, token by token")


# Dry runs of published decoders, from a config.json each: layers, parameters, and Llama-2-7B on a board.

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
README = (CONFIGS / "README.md").read_text("utf-8")
LISTED = re.findall(r"^\| `([\w.-]+)` \| (\d+) \| ([\d.]+) B \|", README, re.MULTILINE)
POSITIONS = {"gemma-2-9b": 4608}
"""More than the window, so that local and global layers alternate. Others: 1024, for the sake of time."""
QUICK = ("cosmos-ar-4b",)
"""What the families' tests do not show: many layers, those of two kinds among them, and cross-attention."""


def test_the_table_lists_every_folder() -> None:
    assert sorted(name for name, _, _ in LISTED) == sorted(p.name for p in CONFIGS.iterdir() if p.is_dir())


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [row if row[0] in QUICK else pytest.param(*row, marks=pytest.mark.thorough) for row in LISTED],
)
def test_a_published_decoder_is_found_whole(name: str, layers: str, billions: str) -> None:
    options: dict[str, Any] = {"tokens_per_frame": 256, "max_seq_len": POSITIONS.get(name, 1024), "prefill_chunk": 1}
    found = fc.compile(CONFIGS / name, "cpu", dry_run=True, **options)
    assert found.decoder.num_layers == len(found.layers) == int(layers)
    assert all(layer.replay is not None for layer in found.layers)
    assert "repeat-layers" in found.pipeline
    assert found.memory.weights / 4e9 == pytest.approx(float(billions), abs=0.01)
