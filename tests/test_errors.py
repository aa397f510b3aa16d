"""Bad input: a clear error, and nothing left behind."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import PlainDecoder, llama
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

import fastcar_compile as fc
from fastcar_compile.frontend.capture import capture

GATE = fc.ReplayConfig(threshold=[0.1, 0.2, 0.3], heads=[[0], [0], [0]])
"""As `TrainedGate.replay_config` gives it."""


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"replay": fc.ReplayConfig(couple_cfg=True)}, ["couple_cfg pairs row b with row b + batch_size / 2"]),
        ({"replay": fc.ReplayConfig(threshold=[1.0])}, ["1 threshold for a decoder of 2 layers"]),
        ({"max_seq_len": 99}, ["(and 3 more) holds 33 positions, but max_seq_len is 99", "give max_seq_len=33"]),
        ({"replay": GATE}, ["another decoder: it has 3 layers, but this decoder has 2", "train-gate"]),
        ({"batch_size": 2}, ["in each of batch_size rows, with static caches of as many"]),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], texts: list[str]) -> None:
    options = {"tokens_per_frame": 8} | options
    with pytest.raises(fc.UserError) as error:
        fc.compile(PlainDecoder(), "cpu", **options, output=tmp_path / "a")
    assert [t for t in texts if t not in str(error.value)] == []
    assert list(tmp_path.iterdir()) == []


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
        ("org/model-1.5b", r"there is no model folder\n.*\n.*: hf download org/model-1.5b --local-dir model-1.5b"),
        (Third(), r"Third.forward needs extra, which a decode step does not have\n  where: test_errors.py:"),
        (Padded(), r"Padded.forward needs attention_mask, which .*\n.*\n.*none has padding"),
    ],
)
def test_models_that_break_the_protocol(tmp_path: Path, model: Any, text: str) -> None:
    with pytest.raises(fc.CompileError, match=text):
        fc.compile(model, "cpu", tokens_per_frame=8, max_seq_len=33, output=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def on_meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        with torch.device("meta"):
            return make()

    return made


class Published(PreTrainedModel):
    """Published code that derives from Transformers' class, with a forward of its own."""

    config_class = LlamaConfig

    def __init__(self) -> None:
        super().__init__(LlamaConfig(max_position_embeddings=33))
        self.inner = PlainDecoder(rows=33, batch=1)


class Grown(Published):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.inner(input_ids, position_ids)


class Step(Published):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Any:
        return self.inner(input_ids, cache_position)


class Heads(Step):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Any:
        logits = self.inner(input_ids, cache_position)
        return {"codes": logits, "text": logits * 2}


class Grid(Step):
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Any:
        return self.inner(input_ids[:, :, 0], cache_position)


def test_a_published_class_with_a_step_compiles() -> None:
    """Transformers' recipe is for forwards that take its caches."""
    assert fc.compile(Step(), "cpu", tokens_per_frame=8, prefill_chunk=1, dry_run=True).layers


def test_an_alarm_of_the_caller_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_arguments: object, **_named: object) -> Tensor:
        raise TimeoutError("the caller's alarm")

    for model in (PlainDecoder(rows=33, batch=1), llama(max_position_embeddings=33)):
        monkeypatch.setattr(type(model), "forward", late)
        with pytest.raises(TimeoutError, match="the caller's alarm"):
            capture(model, batch_size=1, max_seq_len=33, tokens_per_frame=8, prefill_chunk=1)


@pytest.mark.parametrize(
    ("make", "text", "hint"),
    [
        (Grown, "Grown.forward takes (input_ids, position_ids), which is no decode step", "forward(input_ids [B, T]"),
        (Heads, "the step returns 2 tensors\n", "of one head, or hidden states"),
        (Grid, "traced with cache_position int64 [1], input_ids int64 [1, 1]: IndexError", "inputs_embeds [B, T, H]"),
        (lambda: nn.Linear(4, 4), "Linear.forward takes (input), which is no decode step", "cache_position"),
        (on_meta(llama), "tensors are on the device meta, such as model.embed_tokens.weight", "config.json only"),
        (on_meta(PlainDecoder), "tensors on the meta device have no values", "from_pretrained"),
    ],
)
def test_what_is_no_decoder_says_so(make: Callable[[], nn.Module], text: str, hint: str) -> None:
    """It is asked for no max_seq_len, which would not help."""
    with pytest.raises(fc.CompileError) as error:
        fc.compile(make(), "cpu", tokens_per_frame=8, prefill_chunk=1, dry_run=True)
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
