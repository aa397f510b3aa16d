"""The paper's whole flow: a prompt beside a blank one, four codes a position from a depth head, the authors' gate."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from authors import Flow, Pairs, drawn
from conftest import check_module, first_often, imported

import fastcar_compile as fc
from fastcar_compile.cli.options import parse_thresholds
from fastcar_compile.errors import InputError
from fastcar_compile.ir.draws import Noise

EXAMPLE = Path(__file__).parents[1] / "examples" / "vila_u"
ROWS, COUNT, GUIDANCE = 2, 20, 3.0


class Whole(NamedTuple):
    """Body and head in PyTorch, and their artifacts."""

    body: Any
    head: Any
    artifact: fc.Artifact
    depth: fc.Artifact


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("vila_u")
    with imported([EXAMPLE], ["structure"]) as example:
        sizes = replace(
            example.structure.SMALL, hidden=64, intermediate=96, layers=2, words=32, positions=32, side=2, entries=40,
            features=16, head=32, head_layers=2, head_heads=2,
        )  # fmt: skip
        body, head = example.structure.build(sizes, ROWS)
        for layer in body.layers:  # scores of the order of 1
            layer.self_attn.q_proj.weight.data *= 12
            layer.self_attn.k_proj.weight.data *= 12
        options: dict[str, Any] = {"target": "cpu", "quant": "none", "batch_size": ROWS}
        replay = fc.ReplayConfig(rotary="key", threshold=">0")
        artifact = fc.compile(body, **options, rows=1, replay=replay, prefill_chunk=1, output=folder / "body")
        depth = fc.compile(head, **options, replay=None, prefill_chunk=1, output=folder / "head")
        return Whole(body, head, artifact, depth)


def prompts(body: Any) -> list[torch.Tensor]:
    """A prompt of seven words and a blank one of two, float32 [P, H]."""
    return [body.embed_tokens(torch.arange(n) * 3 % 32).detach() for n in (7, 2)]


@pytest.mark.parametrize(
    ("backend", "threshold"),
    first_often(
        [("cpu", -4.0), ("onnxruntime", 0.0), ("cpu", 0.0), ("onnxruntime", -4.0), ("eager", -4.0), ("eager", 0.0)], 2
    ),
)
def test_tokens_and_decisions_are_those_of_the_published_flow(whole: Whole, backend: str, threshold: float) -> None:
    flow = Flow(whole.body, 4, threshold)
    pairs = Pairs(flow, whole.body, whole.head, GUIDANCE)
    picks = {None: lambda logits, *_: int(logits.argmax()), 5: drawn(Noise(5, ROWS // 2, 40), 12, 0.9)}
    for seed, pick in picks.items():
        wanted, rows = pairs.generate(prompts(whole.body), COUNT, pick)
        options: dict[str, Any] = {"temperature": 0} if seed is None else {"top_k": 12, "top_p": 0.9, "seed": seed}
        with whole.artifact.session(backend, record=True, depth=whole.depth) as session:
            session.set_threshold(parse_thresholds(f">{threshold}"))
            found = session.generate(prompts(whole.body), COUNT, fc.Sampling(**options, guidance=GUIDANCE))
            assert torch.equal(found, wanted)
            replays = np.array([row.replays for row in rows]).transpose(1, 2, 0)
            assert (session.stats.decisions == replays).all()
            assert 0.2 < replays[4:].mean() <= 1
            assert len(found.unique()) > 5


def test_a_copy_goes_on_alone(whole: Whole) -> None:
    """A head of the copy's own; what is decoded beside it does not change it."""
    given = torch.stack([prompts(whole.body)[0]] * ROWS)
    with whole.artifact.session(depth=whole.depth) as session:
        first = session.generate(given, 3, fc.Sampling(guidance=GUIDANCE))
        with session.fork() as other:
            assert other.position == session.position
            assert torch.equal(other.generate(given, 3, fc.Sampling(guidance=GUIDANCE)), first)


def test_a_head_that_does_not_fit_is_refused(whole: Whole) -> None:
    with pytest.raises(InputError, match="takes embeddings and gives hidden states"):
        whole.depth.session(depth=whole.depth)
    with pytest.raises(InputError, match="does not take embeddings and give logits"):
        whole.artifact.session(depth=whole.artifact)
    with whole.artifact.session() as session, pytest.raises(InputError, match="open the session with a depth head"):
        session.generate(prompts(whole.body), 2)
    with whole.artifact.session(depth=whole.depth) as session, pytest.raises(InputError, match="one code a token"):
        session.generate(prompts(whole.body), 8, jacobi=fc.Jacobi(2))
    with whole.artifact.session(depth=whole.depth) as session, pytest.raises(InputError, match="is not continued"):
        session.generate(prompts(whole.body), 8, reset=False)


def test_a_pipeline_makes_a_file_of_each_prompt(whole: Whole, tmp_path: Path) -> None:
    check_module("imageio")
    import imageio.v3 as imageio

    def encode(text: str) -> torch.Tensor:
        return whole.body.embed_tokens(torch.tensor([ord(letter) % 32 for letter in text])).detach()

    def decode(tokens: np.ndarray) -> np.ndarray:
        assert tokens.shape == (3, 4, 4)
        return (tokens[..., :3].reshape(3, 2, 2, 3) / 40).repeat(16, 1).repeat(16, 2)

    pipeline = fc.VideoPipeline(whole.artifact, encode, decode, depth=whole.depth)
    sampling = fc.Sampling(guidance=GUIDANCE, seed=3)
    a, b = pipeline(["a fox", "rain"], 3, sampling, progress=False)
    assert repr(a) == "Video(3 frames of 32 x 32)"
    assert (a.tokens != b.tokens).any()
    assert (pipeline(["rain"], 3, sampling, progress=False)[0].tokens == b.tokens).all()
    a.save(tmp_path / "a.gif")
    assert imageio.imread(tmp_path / "a.gif").shape == (3, 32, 32, 3)
    a.save(tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes()[4:8] == b"ftyp"
    with pytest.raises(InputError, match="imageio writes no such file"):
        a.save(tmp_path / "a.nothing")
    with pytest.raises(InputError, match="give several"):
        pipeline("rain", 3)
    with pytest.raises(InputError, match="decode returned"):
        fc.VideoPipeline(whole.artifact, encode, lambda tokens: tokens, depth=whole.depth)(["rain"], 1, sampling)


@pytest.mark.thorough  # its structure is that of the tests above
def test_the_example_runs(tmp_path: Path) -> None:
    check_module("imageio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
        with imported([EXAMPLE], ["generate"]):
            pass
    assert (tmp_path / "a.gif").stat().st_size > 1000
