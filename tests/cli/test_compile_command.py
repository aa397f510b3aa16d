"""`fastcar compile`: reading models, passing options on, refusing bad input. The compiler itself is faked."""

import json
import logging
import math
import re
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from decoders import llama
from pydantic import BaseModel

import fastcar_compile as fc
from fastcar_compile.cli.commands import REGISTRY
from fastcar_compile.compiler import _warn_of_thresholds
from fastcar_compile.compiler import compile as compile_model
from fastcar_compile.config import ReplayConfig
from fastcar_compile.config.formats import KV_TYPES, QUANT_FORMATS
from fastcar_compile.config.listing import listed
from fastcar_compile.config.options import PARTS, CompileOptions, asked, option_words
from fastcar_compile.errors import BackendError
from fastcar_compile.gates import GATES
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of
from fastcar_compile.support.values import LOGGER, reporter
from fastcar_compile.tune.evaluate import Study

from .conftest import FakeArtifact, Fastcar, refused


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Replaces `fc.compile`; the keyword arguments of each call are appended, the model under "model"."""
    seen: list[dict[str, Any]] = []

    def fake_compile(model: Any, dry_run: bool, **options: Any) -> FakeArtifact:
        assert not dry_run
        reporter(None)("capturing [the] step")
        LOGGER.warning("no linker")
        seen.append({"model": model, **options})
        return FakeArtifact(tmp_path / "artifact")

    monkeypatch.setattr(fc, "compile", fake_compile)
    return seen


def save_llama(folder: Path) -> Path:
    """A tiny Llama as Hugging Face writes it."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}
    llama(num_hidden_layers=1, **sizes).save_pretrained(folder)
    return folder


def test_huggingface_folder(fastcar: Fastcar, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    options = ["--target", "kv260", "--tokens-per-frame", "4", "--max-seq-len", "32", "--batch-size", "2"]
    replay = ["--quant", "w8a8", "--offload", "linears", "--threshold", "inf", "--max-chain", "1", "--couple-cfg"]
    replay += ["--host-cpus", "native, avx2", "--kv", "float16"]
    result = fastcar("compile", folder, *options, *replay, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "path": str(tmp_path / "artifact"), "sites": 3, "files": 1, "bytes": 2_000_000,
        "digest": f"sha256:{'0' * 64}",
    }  # fmt: skip
    call = calls[0]
    assert call.pop("model") == folder
    config = call.pop("replay")
    assert (config.threshold, config.max_chain, config.couple_cfg) == (math.inf, 1, True)
    assert call == {
        "target": "kv260", "tokens_per_frame": 4, "max_seq_len": 32, "batch_size": 2, "quant": "w8a8",
        "offload": "linears", "output": str(tmp_path / "out"),
        "host_cpus": ["native", "avx2"], "kv": "float16", "strict": False, "cache": True,
    }  # fmt: skip


def test_sparse_attention(fastcar: Any, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    base = ["compile", folder, "-o", tmp_path / "out"]
    assert fastcar(*base, "--window", "8", "--sinks", "2", "--window-positions", "cache").exit_code == 0
    assert fastcar(*base, "--window", "9").exit_code == 0
    expected = [(8, 2, "cache"), (9, 16, "absolute")]
    found = [call["sparse_attention"] for call in calls]
    assert [(s.window, s.sinks, s.positions) for s in found] == expected
    refused(fastcar(*base, "--sinks", "2"), "--sinks needs --window", "give --window, or leave --sinks out")


class Doubler(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_exported_program(fastcar: Fastcar, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Doubler(), (torch.ones(2),)), path)
    result = fastcar("compile", path, "-o", tmp_path / "out", "--no-replay")
    assert result.exit_code == 0, result.output
    assert "artifact: target zcu102, numbers none, gate tas; 0 of 3 layers may replay, 1 file, 2.0 MB" in result.stdout
    assert result.stderr == "compile: capturing [the] step\nwarning: no linker\n"
    as_json = fastcar("compile", path, "-o", tmp_path / "out", "--no-replay", "--json")
    assert as_json.stderr == "warning: no linker\n"
    assert (LOGGER.level, LOGGER.handlers) == (logging.NOTSET, [])
    assert calls[0]["model"] == path
    assert calls[0]["replay"] is None


def test_output_is_required(fastcar: Fastcar, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    result = fastcar("compile", save_llama(tmp_path / "model"))
    assert (result.exit_code, calls) == (2, [])
    assert "there is no folder for the artifact" in result.stderr


def test_the_default_target_is_this_machine(fastcar: Fastcar, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    assert fastcar("compile", save_llama(tmp_path / "model"), "-o", tmp_path / "out").exit_code == 0
    assert calls[0]["target"] == signature(compile_model).parameters["target"].default == "cpu"


def test_an_output_may_be_called_like_a_target(
    fastcar: Fastcar, calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert fastcar("compile", save_llama(tmp_path / "model"), "--target", "cpu", "-o", "cpu").exit_code == 0
        (tmp_path / "cpu").mkdir(exist_ok=True)
    assert calls[1]["output"] == "cpu"


def test_thresholds_that_go_with_a_replaced_artifact_are_told(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for stored, warned in (({"thresholds": {"values": [1]}}, 1), ({"thresholds": None}, 0), ([], 0)):
        (tmp_path / "old" / "manifest.json").write_text(json.dumps(stored))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _warn_of_thresholds(tmp_path / "old")
            _warn_of_thresholds(tmp_path / "new")
        assert [str(tmp_path / "old") in str(each.message) for each in caught] == [True] * warned


def test_what_needs_a_board_names_one(fastcar: Fastcar, fake: FakeArtifact, tmp_path: Path) -> None:
    for words in (("hls-report", fake.path, tmp_path), ("estimate", "--shape", "llama2-7b", "--target", "cpu")):
        refused(fastcar(*words), "--target zcu102")
    stored: Any = fake
    with pytest.raises(BackendError, match=r"has no accelerator kernels\n.*--target zcu102"):
        accelerator_of(stored)


def test_a_dry_run_of_a_config_as_text_and_as_json(fastcar: Fastcar, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    words = ["compile", folder, "--dry-run", "--target", "kv260", "--offload", "linears", "--tokens-per-frame", "4"]
    text, data = fastcar(*words), fastcar(*words, "--json")
    assert (text.exit_code, data.exit_code) == (0, 0), text.output
    for line in ("would be built; nothing was written", "model.layers.0.mlp", "gated silu 16 -> 32", "ps_ddr4"):
        assert line in text.stdout
    report = json.loads(data.stdout)
    assert (report["target"], report["problems"], report["speed"][0]["case"]) == ("kv260", [], "dense")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_dry_run_that_is_refused(fastcar: Fastcar, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    words = ["compile", folder, "--dry-run", "--target", "kv260", "--offload", "all", "--tokens-per-frame", "4"]
    text = fastcar(*words)
    assert text.exit_code == 2, text.output
    assert "would be REFUSED" in text.stdout
    assert "heads of 8 elements (a multiple of 32)" in text.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--target", "zcu12"], "unknown target 'zcu12'"),
        (["--threshold", "x"], "'x' is not a threshold"),
        (["--max-chain", "0"], "error: --max-chain: Input should be greater than or equal to 1"),
    ],
)
def test_bad_input(fastcar: Fastcar, calls: list[dict[str, Any]], tmp_path: Path, words: list[str], text: str) -> None:
    (tmp_path / "model").mkdir()
    refused(fastcar("compile", tmp_path / "model", "-o", tmp_path / "out", *words), text)
    assert calls == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], True),
        (["--no-cache"], False),
        (["--cache", "there"], "there"),
        (["--cache", "http://host", "--cache-write"], ("http://host", True, False)),
        (["--cache", "http://host", "--cache-libraries"], ("http://host", False, True)),
    ],
)
def test_a_cache_is_named(
    fastcar: Fastcar, calls: list[dict[str, Any]], tmp_path: Path, words: list[str], found: object
) -> None:
    (tmp_path / "model").mkdir()
    base = ["compile", tmp_path / "model", "-o", tmp_path / "out"]
    assert fastcar(*base, *words).exit_code == 0
    cache = calls[0]["cache"]
    assert found == ((cache.remote, cache.write, cache.libraries) if isinstance(cache, fc.Cache) else cache)
    refused(fastcar(*base, "--no-cache", "--cache", "there"), "--no-cache and --cache cannot be given together")
    refused(fastcar(*base, "--cache-write"), "--cache-write needs --cache")


def test_a_folder_that_is_no_model(fastcar: Fastcar, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    words = ["compile", tmp_path / "model", "-o", tmp_path / "out", "--cache", tmp_path / "cache"]
    refused(fastcar(*words), "the model folder has no config.json")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_name_on_the_hub(fastcar: Fastcar, tmp_path: Path) -> None:
    result = fastcar("compile", "org/model", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "downloaded first: hf download org/model --local-dir model" in result.stderr.replace("\n", " ")


def literals(config: type[BaseModel], field: str) -> tuple[str, ...]:
    """The values of a field that is a Literal."""
    return get_args(config.model_fields[field].annotation)


CHOICES = {
    "gate": GATES,
    "kv": KV_TYPES,
    "numerics": literals(fc.CompileConfig, "numerics"),
    "offload": literals(fc.CompileConfig, "offload"),
    "quant": QUANT_FORMATS,
    "window_positions": literals(fc.SparseAttention, "positions"),
}
"""Option of `fastcar compile` -> its values."""


def test_an_option_of_the_list_is_everywhere(fastcar: Fastcar) -> None:
    """An option is added in two files: in the list, and where it takes effect. The rest follows, and the types here."""
    known = get_type_hints(fc.CompileConfig) | get_type_hints(ReplayConfig) | {"positions": str}
    fields = {option.name: option for option in listed(fc.CompileConfig)}
    assert fields.keys() == fc.CompileConfig.model_fields.keys(), "each has its text, and so the reference page"
    assert [option.name for option in listed(ReplayConfig) if option.name not in ReplayConfig.model_fields] == []

    types = get_type_hints(CompileOptions)
    assert asked({}).keys() == types.keys() == fields.keys() - {"target"}, "Python takes it, and the cache's key has it"
    for name in types.keys() - {"jacobi", "replay", "sparse_attention"}:
        kinds = {str if get_origin(kind) is Literal else kind for kind in get_args(known[name]) or (known[name],)}
        kinds = {str if isinstance(kind, str) else kind for kind in kinds}
        option = fields[name]
        left = {type(None)} if option.listing.decided or option.default is None else set[type]()
        assert set(get_args(types[name]) or (types[name],)) == kinds | left, name

    text = fastcar("compile", "--help-experts").stdout
    shown = dict(re.findall(r"^  (?:-\w, )?--([\w-]+) +(?:<\w+> +)?(.*(?:\n {6}.*)*)", text, re.MULTILINE))
    given = {word.replace("_", "-"): part for word, _, part in option_words()}
    parts = [option for kind in PARTS.values() for option in listed(kind)]
    assert len(given) == len(parts) + len(fields) - 1 - len(PARTS)
    for word, part in given.items():
        assert " ".join(shown[word].split()).startswith(part.help), word
    for name, values in CHOICES.items():
        found = re.findall(r"[\w-]+", shown[name.replace("_", "-")])
        assert [value for value in values if value not in found] == [], name


def test_the_help_of_compile_fits_two_screens(fastcar: Fastcar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    brief, whole = fastcar("compile", "--help").stdout, fastcar("compile", "--help-experts").stdout
    assert max(map(len, brief.splitlines())) <= 100
    assert len(brief.splitlines()) <= 80
    assert re.findall(r"^(\w+):$", brief, re.MULTILINE) == [
        *("Arguments", "Options", "Decoder", "Decoding", "Replay", "Numbers", "Board", "Cache")
    ]
    assert "--engine" in whole
    assert "--engine" not in brief


@pytest.mark.parametrize(
    ("command", "function", "not_here", "other_defaults"),
    [
        ("calibrate", fc.calibrate, {"source", "replay", "tokens_per_frame", "quant", "progress"}, set()),
        ("evaluate", Study, {"source", "groups", "progress"}, set()),
        ("run", fc.Sampling, set(), {"temperature"}),
        ("train-gate", fc.train_gate, {"model", "softness", "progress"}, set()),
        ("fit-draft", fc.fit_draft, {"source", "progress"}, set()),
        ("tune-decoder", fc.tune_decoder, {"model", "softness", "progress"}, set()),
    ],
)
def test_a_command_has_the_options_of_its_function(
    command: str, function: Callable[..., Any], not_here: set[str], other_defaults: set[str]
) -> None:
    here, there = signature(REGISTRY.load(command)).parameters, signature(function).parameters
    both = here.keys() & there.keys()
    assert there.keys() - both == not_here
    assert {name for name in both if here[name].default != there[name].default} == other_defaults
