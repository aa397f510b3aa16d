"""Model -> artifact -> session, on every backend, against the original model."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from agreement import decode
from decoders import PlainDecoder, headless_llama, llama

import fastcar_compile as fc
from fastcar_compile.artifact.explain import Described, Description
from fastcar_compile.runtime.backends.cpu import CpuStepper

FRAME, LENGTH = 8, 65
BACKENDS = ("eager", "cpu", "onnxruntime")
STEPS_ONLY: dict[str, Any] = {"tokens_per_frame": FRAME, "prefill_chunk": 1}
"""For prompts of one token: the library of a longer prompt takes as long to compile as everything else."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fc.Artifact]:
    """The small Llama at batch 2, in float32 and w8a8."""
    folder = tmp_path_factory.mktemp("artifacts")
    return {
        quant: fc.compile(
            llama(),
            target="cpu",
            tokens_per_frame=FRAME,
            max_seq_len=LENGTH,
            batch_size=2,
            quant=quant,
            replay=fc.ReplayConfig(threshold=0.0),
            prefill_chunk=16,
            output=folder / quant,
        )
        for quant in ("none", "w8a8")
    }


def test_artifacts_and_sessions_say_what_they_are(artifacts: dict[str, fc.Artifact]) -> None:
    artifact = artifacts["w8a8"]
    assert str(artifact) == "\n".join(
        [
            f"Artifact {artifact.path}",
            "  target   cpu",
            "  decoder  2 layers of 64, 8 tokens per frame, 65 positions, 2 rows",
            "  numbers  weights w8a8, KV cache float32, numerics native",
            "  gate     tas in 2 of 2 layers, threshold 0",
            f"  digest   {artifact.digest}",
        ]
    )
    session = artifact.session("eager")
    decode(session, tokens(length=24), 1)
    lines = str(session).splitlines()
    assert lines[:4] == ["Session", "  backend  eager", f"  artifact {artifact.path}", f"  digest   {artifact.digest}"]
    assert lines[-1] == f"  state    24 of 65 positions, {session.stats.replay_ratio:.1%} of the MLPs replayed"
    session.set_threshold([0.25, None])
    assert "  gate     tas in 1 of 2 layers, threshold 0.25\n" in str(session)
    session.set_threshold(None)
    assert "  gate     tas in 0 of 2 layers\n" in str(session)
    session.close()
    assert str(session).startswith("Session, closed\n")
    assert "<th>gate</th><td>tas in 0 of 2 layers" in session._repr_html_()


def test_what_files_say_cannot_write_to_a_terminal_or_a_page() -> None:
    class Named(Described):
        def _description(self) -> Description:
            return "A <b>", {"target": "x\x1b[2J<script>"}

    assert str(Named()) == "A <b>\n  target   'x\\x1b[2J<script>'"
    assert "<script>" not in Named()._repr_html_()
    assert "A &lt;b&gt;" in Named()._repr_html_()


def test_graphs_print_without_releases_of_memory(artifacts: dict[str, fc.Artifact]) -> None:
    for graph in (artifacts["w8a8"].graph, artifacts["w8a8"].original_graph, fc.load(artifacts["none"].path).graph):
        text = graph.print_readable(print_output=False)
        assert "torch.ops.aten.embedding.default(" in text
        assert "= None" not in text
        assert "No stacktrace" not in text
        assert "tokens = None" in graph.code, "the code that runs frees its values"


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", [1, 16, 21])
def test_gate_off_equals_the_original_model(artifacts: dict[str, fc.Artifact], backend: str, prompt: int) -> None:
    ids = tokens()
    with torch.inference_mode():
        expected = llama()(ids).logits[:, prompt - 1 :]
    session = artifacts["none"].session(backend)
    session.set_threshold(float("inf"))
    torch.testing.assert_close(decode(session, ids, prompt), expected, atol=1e-4, rtol=0)
    assert session.stats.replay_ratio == 0.0


@pytest.mark.parametrize("quant", ["none", "w8a8"])
def test_gate_on_decisions_and_logits_agree(artifacts: dict[str, fc.Artifact], quant: str) -> None:
    ids = tokens()
    eager, *others = (artifacts[quant].session(b, record=True) for b in BACKENDS)
    expected = decode(eager, ids, 1)
    assert 0.0 < eager.stats.replay_ratio < 0.8
    for session in others:
        actual = decode(session, ids, 1)
        assert (eager.stats.decisions == session.stats.decisions).all()
        torch.testing.assert_close(actual, expected, atol=1e-4 if quant == "none" else 1e-2, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_replays_all_but_the_first_frame(artifacts: dict[str, fc.Artifact], backend: str) -> None:
    session = artifacts["none"].session(backend)
    session.set_threshold(-float("inf"))
    decode(session, tokens(), 1)
    forwards = LENGTH - 1
    assert session.stats.per_layer == pytest.approx([(forwards - FRAME) / forwards] * 2)


def test_mlp_is_skipped_when_every_row_replays(artifacts: dict[str, fc.Artifact], tmp_path: Path) -> None:
    """After frame one, poisoned MLP weights are never read: the logits stay finite."""
    model = llama()
    clean = decode_all_replay(model, tmp_path / "clean")
    assert torch.isfinite(clean).all()
    session = fc.load(tmp_path / "clean").session("cpu")
    session.set_threshold(-float("inf"))
    ids = tokens(1)
    session.prefill(ids[:, :1])
    for i in range(1, 1 + FRAME):
        session.step(ids[:, i])
    backend = session._stepper
    assert isinstance(backend, CpuStepper)
    for name, tensor in zip(backend._decode.names, backend._decode.arguments, strict=True):
        if ".mlp." in name:
            torch.from_dlpack(tensor).fill_(torch.nan)
    assert torch.isfinite(session.step(ids[:, 1 + FRAME])).all()
    session.set_threshold(float("inf"))
    assert not torch.isfinite(session.step(ids[:, 2 + FRAME])).all()


def decode_all_replay(model: torch.nn.Module, path: Path) -> torch.Tensor:
    replay = fc.ReplayConfig(threshold=-float("inf"))
    artifact = fc.compile(model, "cpu", max_seq_len=LENGTH, replay=replay, output=path, **STEPS_ONLY)
    return decode(artifact.session("cpu"), tokens(1), 1)


def test_reset_and_sessions_share_no_state(artifacts: dict[str, fc.Artifact]) -> None:
    first, second = artifacts["none"].session("cpu"), artifacts["none"].session("cpu")
    ids, other = tokens(), tokens().flip(1)
    alone = decode(first, ids, 1)
    decode(second, other, 1)
    decode(first, other, 1)
    torch.testing.assert_close(decode(first, ids, 1), alone, atol=0, rtol=0)


def test_plain_module_of_the_step_protocol(tmp_path: Path) -> None:
    model = PlainDecoder()
    ids = torch.randint(0, 11, (1, 33))
    with torch.inference_mode():
        expected = PlainDecoder()(ids, torch.arange(33))
    artifact = fc.compile(
        model, "cpu", replay=fc.ReplayConfig(threshold=float("inf")), output=tmp_path / "a", **STEPS_ONLY
    )
    assert [s.mlp.activation for s in artifact.sites] == ["gelu", "gelu"]
    for backend in BACKENDS:
        torch.testing.assert_close(decode(artifact.session(backend), ids, 1), expected, atol=1e-4, rtol=0)


def test_headless_decoder(tmp_path: Path) -> None:
    model = headless_llama()
    embeddings = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(inputs_embeds=embeddings).last_hidden_state
    model.set_input_embeddings(cast("torch.nn.Module", None))  # a headless decoder has none
    artifact = fc.compile(
        model, "cpu", tokens_per_frame=8, output=tmp_path / "a", replay=fc.ReplayConfig(threshold=1e9)
    )
    torch.testing.assert_close(decode(artifact.session("cpu"), embeddings, 4), expected[:, 3:], atol=1e-4, rtol=0)
    with pytest.raises(fc.InputError, match="a headless decoder has no tokens to generate"):
        fc.TransformersDecoder(artifact.session("cpu"))
