"""`fastcar estimate` and `fastcar run --trace`."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import first_often
from decoders import llama
from manifests import layer_part
from transformers import LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.engine import MlpSpec
from fastcar_compile.artifact.sections import LayersSection
from fastcar_compile.cli import opt
from fastcar_compile.cli.commands import REGISTRY
from fastcar_compile.cli.estimate import as_compiled
from fastcar_compile.codegen.hls.control_table.table import Limits
from fastcar_compile.codegen.hls.design.exploration import Exploration, KernelSpec, explore
from fastcar_compile.codegen.hls.model import question
from fastcar_compile.codegen.hls.model.workload import workload_of
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.config.targets import Target, load_target
from fastcar_compile.gates import GateWeights
from fastcar_compile.ir.types import ReplayFacts
from fastcar_compile.phases import _analysed

from .conftest import FakeArtifact, Fastcar, refused

KV260 = ("estimate", "--shape", "llama2-7b", "--quant", "w4a8", "--target", "kv260", "--context", 512)


@pytest.fixture(autouse=True, scope="module")
def designs() -> Iterator[None]:
    """Each design is searched once, which takes a second."""
    kept: dict[str, Exploration] = {}

    def found(wanted: KernelSpec, target: Target, *, banks: bool) -> Exploration:
        key = repr((wanted, target, banks))
        kept[key] = kept.get(key) or explore(wanted, target, banks=banks)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(question, "explore", found)
        yield


def heads_of_32() -> LlamaForCausalLM:
    """A Llama whose whole steps the accelerator can run."""
    return llama(head_dim=32)


@pytest.fixture
def compiled(fake: FakeArtifact, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake artifact with the manifest's sections that the estimate reads."""
    import fastcar_compile

    weights = GateWeights("ab" * 32)
    wanted = KernelSpec(MlpSpec(128, 352, 2, 3, 1), Limits(table_words=64, query_words=32, key_words=32))
    design = explore(wanted, load_target("zcu102")).design
    replay = fastcar_compile.ReplayConfig(gate="learned", gate_weights=weights)
    gate = ReplayFacts(gate="learned", threshold=0.5, gate_units=4)
    changes = {
        "options": fake.manifest.options.model_copy(update={"quant": "w8a8", "replay": replay}),
        "layers": LayersSection(layers=tuple(layer_part(layer, gate) for layer in range(3))),
        "accelerator": AcceleratorSection.model_construct(design=design.part),
    }
    opened = SimpleNamespace(manifest=fake.manifest.model_copy(update=changes))
    monkeypatch.setattr(fastcar_compile, "load", lambda path: opened)
    return fake.path


def test_json_of_a_shape(fastcar: Fastcar) -> None:
    result = fastcar(*KV260, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["tokens_per_second"] == pytest.approx(4.9, rel=0.1)  # arXiv 2502.10659
    assert (report["offload"], report["what_if"]) == ("all", [])
    linears = json.loads(fastcar(*KV260, "--offload", "linears", "--json").stdout)
    assert linears["tokens_per_second"] < report["tokens_per_second"]  # attention is the host's
    for key in ("bandwidth_utilisation", "energy_per_token_j", "bound_by", "resources", "time_line"):
        assert report[key]
    assert report["time_line"][0].keys() == {"name", "layer", "unit", "start", "seconds", "bytes"}


def test_every_output_says_what_is_not_emitted(fastcar: Fastcar) -> None:
    words = ("estimate", "--shape", "tinyllama-1.1b", "--target", "zcu104-sodimm", "--what-if")
    assert json.loads(fastcar(*words, "--json").stdout)["what_if"][0].startswith("an artifact for zcu104-sodimm")
    assert "NOT EMITTED by this compiler: an artifact for zcu104-sodimm" in fastcar(*words).stdout


def test_the_first_line_says_what_was_assumed(fastcar: Fastcar, compiled: Path) -> None:
    bare = ("estimate", "--shape", "tinyllama-1.1b")
    first = fastcar(*bare).stdout.splitlines()[0]
    assert first.split(maxsplit=1) == ["assumed", "--target zcu102, --quant w8a8, --context 512"]
    assert json.loads(fastcar(*KV260[:-2], "--json").stdout)["assumed"] == ["--context 512"]
    assert "assumed" not in fastcar(*KV260).stdout
    assert "assumed" not in fastcar("estimate", compiled).stdout


def test_text_of_a_shape(fastcar: Fastcar, tmp_path: Path) -> None:
    result = fastcar(*KV260, "--replay", 0.5, "--time-line", tmp_path / "line.json")
    assert result.exit_code == 0
    assert "NOT EMITTED" not in result.stdout
    for text in ("predicted", "50.0% replay", "bound by", "memory", "J per token", "time line written: "):
        assert text in result.stdout
    assert re.search(r"\d+ designs, \d+ too large; bound by memory", result.stdout)
    assert "tas, decided on the accelerator; no cache of its own" in result.stdout


@pytest.mark.thorough  # each text is a search for a design
def test_text_of_a_learned_gate_and_of_drafts(fastcar: Fastcar) -> None:
    learned = fastcar(*KV260, "--replay", 0.5, "--gate", "learned", "--gate-units", 8).stdout
    assert "learned, decided on the accelerator; 134.22 MB of gate cache, 4.196 MB of weights (8 units)" in learned
    drafted = fastcar(*KV260, "--replay", 0.5, "--draft-share", 0.1).stdout
    assert "learned, decided on the accelerator" in drafted
    assert re.search(r"draft +896 neurons and rank 320 in 32 layers, 10\.\d% of the MLPs' weights, .* MB", drafted)


def test_an_artifact_uses_the_design_that_was_emitted(fastcar: Fastcar, compiled: Path) -> None:
    own = json.loads(fastcar("estimate", compiled, "--json").stdout)
    assert (own["target"], own["offload"], own["batch"], own["context"]) == ("zcu102", "mlp", 2, 16)
    assert own["exploration"] == {}
    other = json.loads(fastcar("estimate", compiled, "--target", "kv260", "--json").stdout)
    assert other["target"] == "kv260"
    assert other["exploration"]["tried"] > 1


@pytest.mark.parametrize(
    ("kv", "offload"),
    [("float16", "mlp"), *(pytest.param(kv, "all", marks=pytest.mark.thorough) for kv in (None, "int8"))],
)
def test_a_shape_is_offloaded_as_compile_does_it(fastcar: Fastcar, kv: str | None, offload: str) -> None:
    """Whole steps by default are shown below."""
    report = fc.compile(heads_of_32(), "zcu102", tokens_per_frame=8, kv=kv, dry_run=True)
    words = ["estimate", "--shape", "llama2-7b", "--quant", "w4a8", "--target", "zcu102", "--json"]
    found = json.loads(fastcar(*words, *(["--kv", kv] if kv else [])).stdout)
    assert report.options.offload == found["offload"] == offload


@pytest.mark.parametrize(("model", "offload"), first_often([(heads_of_32, "all"), (llama, "mlp")]))
def test_an_artifact_for_a_cpu_is_offloaded_as_compile_does_it(
    model: Callable[[], Any], offload: str, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps; with heads of 16 the MLPs."""
    artifact = fc.load(compiled)
    config = CompileConfig(target="cpu", tokens_per_frame=8, max_seq_len=64, replay=ReplayConfig())
    manifest = artifact.manifest.model_copy(update={"accelerator": None, "options": config})
    monkeypatch.setattr(fc, "load", lambda path: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(opt, "read_program", lambda path: _analysed(model(), config, lambda _stage: None)[0])
    work = as_compiled(compiled, workload_of(manifest), fc.load_target("zcu102"), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # why whole steps cannot be
        report = fc.compile(model(), "zcu102", tokens_per_frame=8, max_seq_len=64, dry_run=True)
    assert work.offload == report.options.offload == offload
    assert work.kv == {"all": "int8", "mlp": "float32"}[offload]


def test_a_trace_through_files(fastcar: Fastcar, compiled: Path, tmp_path: Path) -> None:
    decisions = np.zeros((12, 3, 2), bool)
    decisions[6:] = True
    np.save(tmp_path / "trace.npy", decisions)
    report = json.loads(fastcar("estimate", compiled, "--trace", tmp_path / "trace.npy", "--json").stdout)
    assert report["replay_ratio"] == 0.5
    assert (report["gate"]["name"], report["gate"]["units"]) == ("learned", 4)
    faster = report["tokens_per_second"] / report["comparison"]["dense"]
    assert report["speedup_over_dense"] == pytest.approx(faster)
    assert report["tokens_per_second"] > report["comparison"]["nothing_replays"]


def test_run_writes_the_trace(fastcar: Fastcar, fake: object, tmp_path: Path) -> None:
    path = tmp_path / "trace.npy"
    result = fastcar("run", tmp_path, "--prompt", "1", "--num-tokens", 9, "--trace", path, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["trace"] == str(path)
    decisions = np.load(path)
    assert (decisions.shape, decisions.dtype) == ((8, 3, 2), np.bool_)
    assert decisions[4:, 0].all()
    refused(fastcar("run", tmp_path, "--prompt", "1", "--trace", tmp_path / "trace.txt"), "is not a .npy file")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "nothing to estimate"),
        (("--shape", "llama9"), "there is no decoder shape 'llama9'"),
        (("folder", "--shape", "llama2-7b"), "ARTIFACT and --shape cannot be given together"),
        (
            ("--shape", "llama2-7b", "--replay", 0.5, "--trace", "t.npy"),
            "--replay and --trace cannot be given together",
        ),
        (("--shape", "llama2-7b", "--trace", "t.npy"), "the trace does not exist"),
        (("--shape", "llama2-7b", "--quant", "int3"), "there is no engine for --quant int3"),
        (("--shape", "llama2-7b", "--offload", "head"), "--offload head is not known"),
        (("--shape", "llama2-7b", "--kv", "flaot16"), "did you mean 'float16'?"),
        (("--shape", "llama2-7b", "--sinks", "4"), "--sinks needs --window"),
        (("--shape", "llama2-7b", "--replay", 2, "--quant", "w4a8"), "replay = 2.0 (0 to 1)"),
        (("--shape", "llama2-7b", "--target", "cpu", "--what-if"), "cpu has no fabric"),
        (("--shape", "llama2-7b", "--target", "cpu"), "A CPU is measured: `fastcar run ARTIFACT --prompt TOKENS`"),
        (("--shape", "llama2-7b", "--target", "zcu104-sodimm"), "does not emit this: an artifact for zcu104-sodimm"),
        (
            ("--shape", "llama2-7b", "--quant", "w4a8", "--acceptance", 2),
            "acceptance = 2.0 (1 to 1, the rows of a video)",
        ),
        (("--shape", "vila-u-7b"), "does not fit the memory of zcu102"),
    ],
)
def test_refusals(fastcar: Fastcar, words: tuple[object, ...], text: str) -> None:
    refused(fastcar("estimate", *words), text)


def test_options_are_called_as_those_of_compile(fastcar: Fastcar) -> None:
    words = ("estimate", "--shape", "vila-u-7b", "--quant", "w4a8", "--batch-size", 1, "--rows", 4, "--json")
    found = json.loads(fastcar(*words, "--window", 64, "--sinks", 2).stdout)
    assert (found["batch"], found["rows"], found["attended"]) == (4, 4, 66)
    assert json.loads(fastcar(*words, "--window", 64).stdout)["attended"] == 64 + fc.SparseAttention().sinks
    own, other = (signature(REGISTRY.load(name)).parameters.keys() for name in ("estimate", "compile"))
    asked = {"artifact", "shape", "context", "replay", "trace", "gate_units", "draft_share", "what_if", "time_line"}
    assert own - other == asked | {"acceptance"}
    coupled = fastcar(*words[:-1], "--acceptance", 2.5).stdout
    rates = [float(x) for x in re.findall(r"512: ([\d.]+) backbone positions/s, ([\d.]+) accepted", coupled)[0]]
    assert rates[1] / rates[0] == pytest.approx(2.5 / 4, rel=0.01)
    assert re.search(r"a prompt's first after \d+\.\d s", coupled)
    assert re.search(r"energy +[\d.]+ J per backbone position, [\d. (to)]+ per J, [\d. (to)]+ W", coupled)


def test_a_file_that_is_no_trace(fastcar: Fastcar, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros((2, 3)))
    refused(
        fastcar("estimate", "--shape", "llama2-7b", "--quant", "w4a8", "--trace", tmp_path / "t.npy"),
        "the trace holds float64 [2, 3], expected bool [forwards, layers, rows]",
    )
