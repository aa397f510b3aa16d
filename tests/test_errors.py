"""Bad input: a clear error, and nothing left behind."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from decoders import PlainDecoder, llama
from torch import Tensor, nn

import fastcar_compile as fc
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import TargetError
from fastcar_compile.ir.ops.operator import REASONS
from fastcar_compile.passes.insert_replay import InsertReplay


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    path = tmp_path_factory.mktemp("errors") / "a"
    return fc.compile(llama(), "cpu", tokens_per_frame=8, output=path)


GATE = fc.ReplayConfig(threshold=[0.1, 0.2, 0.3], heads=[[0], [0], [0]])
"""As `TrainedGate.replay_config` gives it."""


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"batch_size": 0, "prefill_chunk": 0}, ["batch_size: ", "prefill_chunk: ", "correct the fields named"]),
        ({"replay": fc.ReplayConfig(couple_cfg=True)}, ["couple_cfg pairs row b with row b + batch_size / 2"]),
        ({"replay": fc.ReplayConfig(threshold=[1.0])}, ["1 threshold for a decoder of 2 layers"]),
        (
            {"max_seq_len": 99},
            [
                "buffer 'blocks.0.key_cache' (and 3 more) holds 33 positions, but max_seq_len is 99",
                "give max_seq_len=33",
            ],
        ),
        (
            {"replay": GATE},
            ["the gate belongs to another decoder: it has 3 layers, but this decoder has 2", "train-gate"],
        ),
        ({"batch_size": 2}, ["in each of batch_size rows, with static caches of as many"]),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], texts: list[str]) -> None:
    options = {"tokens_per_frame": 8} | options
    with pytest.raises(fc.UserError) as error:
        fc.compile(PlainDecoder(), "cpu", **options, output=tmp_path / "a")
    assert [t for t in texts if t not in str(error.value)] == []
    assert list(tmp_path.iterdir()) == []


class TwoOutputs(PlainDecoder):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        y = super().forward(input_ids, cache_position)
        return y, y + 1  # pyright: ignore[reportReturnType]


class LastToken(PlainDecoder):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        return super().forward(input_ids, cache_position)[:, -1]


class Third(PlainDecoder):
    # a step of another form is what is tested
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, cache_position: Tensor, extra: Tensor
    ) -> Tensor:
        return super().forward(input_ids, cache_position) + extra


class Padded(PlainDecoder):
    # a step of another form is what is tested
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, attention_mask: Tensor, cache_position: Tensor
    ) -> Tensor:
        return super().forward(input_ids, cache_position) * attention_mask[:, -1:, None]


class MayBePadded(PlainDecoder):
    def forward(self, input_ids: Tensor, cache_position: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, cache_position if position_ids is None else position_ids)


def test_a_mask_or_positions_that_are_left_out_are_told() -> None:
    with pytest.warns(UserWarning, match="MayBePadded.forward may take position_ids, which a decode step leaves out"):
        fc.compile(MayBePadded(), "cpu", tokens_per_frame=8, dry_run=True)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (3, "cannot compile a int"),
        ("a name", "there is no model folder\n  where: a name"),
        ("org/model-1.5b", r"there is no model folder\n.*\n.*: hf download org/model-1.5b --local-dir model-1.5b"),
        (TwoOutputs(), "the step returns 2 tensors"),
        (LastToken(), r"the step returns shape \(1, 11\); expected \[B, T, V\] or \[B, T, H\]"),
        (Third(), r"Third.forward needs extra, which a decode step does not have\n  where: test_errors.py:"),
        (Padded(), r"Padded.forward needs attention_mask, which .*\n.*\n.*none has padding"),
    ],
)
def test_models_that_break_the_protocol(tmp_path: Path, model: Any, text: str) -> None:
    with pytest.raises(fc.CompileError, match=text):
        fc.compile(model, "cpu", tokens_per_frame=8, max_seq_len=33, output=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


class UnsizedDecoder(PlainDecoder):
    def __init__(self) -> None:
        super().__init__()
        del self.max_seq_len


def on_meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        with torch.device("meta"):
            return make()

    return made


T5 = hf.T5Config(vocab_size=17, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)


@pytest.mark.parametrize(
    ("make", "text", "hint"),
    [
        (lambda: nn.Linear(4, 4), "Linear.forward takes (input), which is no decode step", "cache_position"),
        (lambda: hf.T5ForConditionalGeneration(T5), "the model has an encoder and a decoder", "as `context`"),
        (on_meta(llama), "tensors are on the device meta, such as model.embed_tokens.weight", "config.json only"),
        (on_meta(PlainDecoder), "tensors on the meta device have no values", "from_pretrained"),
        (UnsizedDecoder, "the model does not say its max_seq_len", "give max_seq_len"),
    ],
)
def test_what_is_no_decoder_says_so(make: Callable[[], nn.Module], text: str, hint: str) -> None:
    """It is asked for no max_seq_len, which would not help."""
    with pytest.raises(fc.CompileError) as error:
        fc.compile(make(), "cpu", tokens_per_frame=8, dry_run=True)
    assert text in str(error.value)
    assert hint in str(error.value)


def test_a_frame_of_no_tokens_is_not_the_default(tmp_path: Path) -> None:
    """Neither where the model's config says so."""
    model = llama()
    model.config.tokens_per_frame = 0
    with pytest.raises(fc.CompileError, match="tokens_per_frame: Input should be greater than or equal to 1"):
        fc.compile(model, "cpu", output=tmp_path / "a")
    for tune in (fc.calibrate, fc.train_gate):
        with pytest.raises(fc.InputError, match="tokens_per_frame is 0"):
            tune(model, torch.zeros(2, 40, dtype=torch.int64), target_replay=0.5)


@pytest.mark.parametrize(
    ("names", "hints"),
    [
        (["native"], [r"apt install g\+\+ \(Debian\)$"]),
        (
            ["avx2", "neon"],
            [r"g\+\+ \(Debian\), or .* host_cpus=\['neon'\]", r"g\+\+-aarch64-linux-gnu \(Debian\), or"],
        ),
    ],
)
def test_a_missing_linker_names_its_package(
    names: list[str], hints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(fc.CompileError) as error:
        fc.compile(PlainDecoder(), "cpu", tokens_per_frame=8, host_cpus=names, dry_run=True)
    problems = error.value.problems or (error.value,)
    assert len(problems) == len(hints)
    assert all(re.search(hint, problem.hint) for hint, problem in zip(hints, problems, strict=True))


def test_a_file_in_the_place_of_the_output_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(fc.ArtifactError, match="the output path exists and is not a folder"):
        fc.compile(PlainDecoder(), "cpu", tokens_per_frame=8, output=tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "mine"


def test_missing_tokens_per_frame_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="256 is assumed"):
        fc.compile(llama(max_position_embeddings=300), "cpu", output=tmp_path / "a", replay=None, prefill_chunk=1)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.zeros(1, 4), "tokens are float32, expected int64"),
        (torch.zeros(2, 4, dtype=torch.int64), r"shape \[2, 4\], expected \[1, P\]"),
        (torch.zeros(1, 70, dtype=torch.int64), "70 tokens, but max_seq_len is 65"),
        (torch.full((1, 1), 17).expand(1, 10**6), "1000000 tokens, but max_seq_len is 65"),  # its ids are not read
        (torch.full((1, 4), 17), "token 17 is outside the vocabulary of 17"),
    ],
)
def test_bad_prompts(artifact: fc.Artifact, ids: Tensor, text: str) -> None:
    with pytest.raises(fc.InputError, match=text):
        artifact.session("cpu").prefill(ids)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.zeros(1), "tokens are float32, expected int64"),
        (torch.zeros(1, dtype=torch.int32), "tokens are int32, expected int64"),
        (torch.zeros(1, 1, dtype=torch.int64), r"shape \[1, 1\], expected \[1\]"),
        (torch.zeros(3, dtype=torch.int64), r"shape \[3\], expected \[1\]"),
        (torch.tensor([-1]), "token -1 is outside the vocabulary of 17"),
    ],
)
def test_a_bad_step_changes_nothing(artifact: fc.Artifact, ids: Tensor, text: str) -> None:
    session = artifact.session("eager")
    session.prefill(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(fc.InputError, match=text):
        session.step(ids)
    assert session.position == 4


def test_a_full_cache_takes_no_more(artifact: fc.Artifact) -> None:
    session = artifact.session("eager")
    session.prefill(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(fc.InputError, match="after 65 tokens the step adds 1 token, but max_seq_len is 65"):
        session.step(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(fc.InputError, match="already holds tokens"):
        session.prefill(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "num_tokens is 0"), (63, "4 prompt tokens and 63 new ones do not fit max_seq_len 65")]
)
def test_generation_that_does_not_fit(artifact: fc.Artifact, count: int, text: str) -> None:
    with pytest.raises(fc.InputError, match=text):
        artifact.session("eager").generate(torch.zeros(1, 4, dtype=torch.int64), count)


@pytest.mark.parametrize(("thresholds", "text"), [([1.0], "1 threshold for 2 layers"), (float("nan"), "is NaN")])
def test_bad_thresholds(artifact: fc.Artifact, thresholds: Any, text: str) -> None:
    with pytest.raises(fc.InputError, match=text):
        artifact.session("eager").set_threshold(thresholds)


def test_unknown_backend(artifact: fc.Artifact) -> None:
    with pytest.raises(fc.BackendError, match="unknown backend 'gpu'"):
        artifact.session("gpu")


def test_tampered_file_is_refused_before_loading(artifact: fc.Artifact, tmp_path: Path) -> None:
    made = Path(shutil.copytree(artifact.path, tmp_path / "a"))
    library = next((made / "host").rglob("decoder.so"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    (made / "graph" / "after.txt").unlink()
    with pytest.raises(fc.ArtifactError) as error:
        fc.load(made)
    assert "decoder.so" in str(error.value)
    assert "after.txt" in str(error.value)


@pytest.mark.parametrize("name", ["manifest.json", "weights/model.safetensors", "graph/after.json"])
def test_a_missing_file_is_named(artifact: fc.Artifact, tmp_path: Path, name: str) -> None:
    shutil.copytree(artifact.path, tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    with pytest.raises(fc.ArtifactError, match=name):
        fc.load(tmp_path / "a")


def test_a_missing_artifact_is_named(tmp_path: Path) -> None:
    with pytest.raises(fc.ArtifactError, match="nowhere"):
        fc.load(tmp_path / "nowhere")


def test_explain_names_layers_and_nodes(artifact: fc.Artifact) -> None:
    text = artifact.explain()
    assert "layer 1: model.layers.1.mlp" in text
    assert "mlp_cache_1" in text
    assert "made by  insert-replay" in artifact.explain(node="cond")
    why = f"{REASONS['cond']} {InsertReplay.reason}"
    assert f"reason   {why}" in artifact.explain(node="cond")
    with pytest.raises(fc.InputError, match="no node 'nothing'"):
        artifact.explain(node="nothing")


def test_a_fault_in_every_value_gives_a_short_error(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(f"limits = {{ {', '.join(f'x{i} = 0' for i in range(300))} }}\n")
    with pytest.raises(TargetError) as caught:
        load_target(path)
    text = caught.value.what
    assert "limits.x0: Extra inputs are not permitted (given: 0)" in text
    assert re.search(r"; and 2\d\d more$", text)
    assert len(text) < 10_000
