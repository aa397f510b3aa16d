"""The layer-by-layer evaluator against the rewritten graph, token by token."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from decoders import SIZES, llama
from gates.networks import networks
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import fastcar_compile as fc
from fastcar_compile.config import CompileConfig
from fastcar_compile.errors import InputError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import shape_of, value_of
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.pipeline import analysis_pipeline, rewrite_pipeline
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session
from fastcar_compile.tune.calibrate import rules_of
from fastcar_compile.tune.evaluator import Evaluator, with_rows

FRAME, LENGTH, LAYERS, ROWS, VIDEOS = 8, 33, 2, 2, 3


def windowed() -> Qwen2ForCausalLM:
    """The second layer sees the last six tokens, fewer than a frame."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)).eval()


CASES: list[tuple[str, dict[str, Any], int]] = [
    ("tas", {"heads": [[1, 2], {0: 1.0, 3: -0.5}], "couple_cfg": True}, 1),
    ("tas", {"rotary": "key"}, 3),
    ("input_delta", {"max_chain": 2}, 3),
    ("learned", {"gate_weights": networks(64, 5, 3), "refresh_every": 3}, 1),
]


@cache
def captured(build: Callable[[], nn.Module], chunk: int) -> DecoderProgram:
    sizes = {"batch_size": ROWS, "max_seq_len": LENGTH, "tokens_per_frame": FRAME, "prefill_chunk": chunk}
    return run_pipeline(capture(build(), **sizes), analysis_pipeline())


def rewritten(
    replay: fc.ReplayConfig, quant: str = "none", chunk: int = 5, build: Callable[[], nn.Module] = llama
) -> DecoderProgram:
    config = CompileConfig(
        target="cpu", tokens_per_frame=FRAME, max_seq_len=LENGTH, batch_size=ROWS, quant=quant, replay=replay
    )
    return run_pipeline(deepcopy(captured(build, chunk)), rewrite_pipeline(config, LAYERS))


@pytest.fixture(scope="module")
def plain() -> DecoderProgram:
    return rewritten(fc.ReplayConfig(gate="input_delta"))


def videos(count: int = VIDEOS) -> np.ndarray:
    """Few symbols, so that places repeat between frames; one more token than the cache holds, as the last target."""
    return np.random.default_rng(4).integers(0, 3, (count, LENGTH + 1))


def by_session(
    source: DecoderProgram, thresholds: list[float], prompt: int, coupled: bool = False
) -> tuple[float, list[float], np.ndarray]:
    """NLL from the second frame on, replayed share of t >= F per layer and all decisions [L, N, t], token by token;
    three videos in two rows, or four whose halves are pairs."""
    backend = EagerStepper(replace(source, prefill=None))
    losses, replayed, decisions = [], [], []
    groups = ([0, 2], [1, 3]) if coupled else ([0, 1], [2, 2])
    for rows in groups:
        session = Session(backend, source.config, thresholds, record=True)
        ids = torch.from_numpy(videos(4 if coupled else VIDEOS)[rows])
        logits = [session.prefill(ids[:, :prompt])]
        logits += [session.step(ids[:, i]) for i in range(prompt, LENGTH)]
        kept = slice(0, len(set(rows)))
        first = prompt + FRAME - 1
        stacked = torch.stack(logits[FRAME:], 1)[kept]
        targets = ids[kept, first + 1 :]
        losses.append(torch.nn.functional.cross_entropy(stacked.flatten(0, 1), targets.flatten(), reduction="none"))
        replayed.append(session.stats.decisions[FRAME:, :, kept])
        decisions.append(session.stats.decisions[:, :, kept].transpose(1, 2, 0))
    ratios = list(np.concatenate(replayed, 2).mean((0, 2)))
    order = np.argsort([row for rows in groups for row in dict.fromkeys(rows)])
    return float(torch.cat(losses).mean()), ratios, np.concatenate(decisions, 1)[:, order]


def middle_thresholds(evaluator: Evaluator) -> list[float]:
    """Per layer the middle of the widest gap between its middle scores on top of the layers before it."""
    chosen: list[float | None] = [None] * LAYERS
    for layer in range(LAYERS):
        scores = evaluator.measure(chosen).scores[layer].sort().values
        middle = scores[len(scores) // 3 : 2 * len(scores) // 3]
        at = int(middle.diff().argmax())
        chosen[layer] = float(middle[at : at + 2].mean())
    return chosen  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(("gate", "options", "prompt"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_evaluator_equals_the_session(gate: str, options: dict[str, Any], prompt: int) -> None:
    replay = fc.ReplayConfig(gate=gate, **options)
    check_against_the_session(replay, rewritten(replay), prompt)


def test_a_window_of_the_model_is_evaluated_over_its_ring() -> None:
    replay = fc.ReplayConfig()
    source = rewritten(replay, build=windowed)
    assert [s.shape[2] for s in source.state if s.role is StateRole.KEY_CACHE] == [LENGTH, FRAME + 5]
    check_against_the_session(replay, source, prompt=3)


def check_against_the_session(replay: fc.ReplayConfig, source: DecoderProgram, prompt: int) -> None:
    """Losses, ratios and decisions of the evaluator are those of a session, token by token."""
    coupled = replay.couple_cfg
    given = videos(4 if coupled else VIDEOS)
    evaluator = Evaluator(source, given, rules_of(replay, LAYERS), prompt)
    thresholds = middle_thresholds(evaluator)
    found = evaluator.measure(thresholds)
    nll, ratios, decisions = by_session(source, thresholds, prompt, coupled)
    assert 0 < found.replay < 1
    np.testing.assert_allclose(found.ratios, ratios)
    assert found.nll == pytest.approx(nll, rel=1e-5)
    details = evaluator.details(thresholds)
    np.testing.assert_array_equal(details.replayed.numpy(), decisions)
    assert details.losses.shape == details.predicted.shape == (len(given), LENGTH + 1 - prompt)
    if coupled:
        assert np.array_equal(decisions[:, :2], decisions[:, 2:])
    assert float(details.losses[:, FRAME:].mean()) == pytest.approx(nll, rel=1e-5)


def test_tokens_that_are_given_count_in_no_mean(plain: DecoderProgram) -> None:
    """Token 2 is given. Its forwards replay as the others do, and it is never the most likely token."""
    given, rules = videos(), rules_of(fc.ReplayConfig(gate="input_delta"), LAYERS)
    whole, evaluator = (Evaluator(plain, given, rules, 3, counted=counted) for counted in (None, (0, 2)))
    thresholds = middle_thresholds(whole)
    found, every = evaluator.details(thresholds), whole.details(thresholds)
    np.testing.assert_array_equal(found.counted, given[:, 3:] < 2)
    assert torch.equal(found.replayed, every.replayed)
    assert torch.equal(found.losses, every.losses)
    assert every.counted.all()
    assert int(found.predicted.max()) < 2 < int(every.predicted.max())
    measured, later = evaluator.measure(thresholds), found.counted[:, FRAME:]
    assert measured.nll == pytest.approx(float(found.losses[:, FRAME:][later].mean()))
    assert measured.nll != pytest.approx(whole.measure(thresholds).nll, rel=1e-3)
    assert measured.ratios == whole.measure(thresholds).ratios
    with pytest.raises(InputError, match="no token after the first frame has an id in"):
        Evaluator(plain, given, rules, counted=(3, 9))


def test_w8a8_has_the_layers_of_its_own_graph() -> None:
    replay = fc.ReplayConfig(gate="input_delta")
    source = rewritten(replay, "w8a8")
    evaluator = Evaluator(source, videos(), rules_of(replay, LAYERS))
    thresholds = middle_thresholds(evaluator)
    nll, ratios, _ = by_session(source, thresholds, 1)
    found = evaluator.measure(thresholds)
    np.testing.assert_allclose(found.ratios, ratios, atol=0.03)
    assert found.nll == pytest.approx(nll, rel=1e-2)


def test_kept_stages_change_nothing(plain: DecoderProgram) -> None:
    """Measuring in another order gives the same numbers: only what follows the first change is computed again."""
    rules = rules_of(fc.ReplayConfig(gate="input_delta"), LAYERS)
    evaluator, fresh = (Evaluator(plain, videos(), rules) for _ in range(2))
    evaluator.measure([0.5, None])
    evaluator.measure([0.5, 0.9])
    first = evaluator.measure([None, 0.9])
    again = fresh.measure([None, 0.9])
    assert (first.nll, first.ratios) == (again.nll, again.ratios)
    assert again.ratios[0] == 0.0


@pytest.mark.parametrize(("quant", "build"), [("none", windowed), ("w8a8", llama)])
def test_a_batch_of_more_rows_changes_nothing(quant: str, build: Callable[[], nn.Module]) -> None:
    replay = fc.ReplayConfig(gate="input_delta")
    source = rewritten(replay, quant, build=build)
    wide = with_rows(source, VIDEOS)
    assert (source.config.batch_size, wide.config.batch_size) == (ROWS, VIDEOS)
    given = Evaluator(source, videos(), rules_of(replay, LAYERS))
    thresholds = middle_thresholds(given)
    expected = given.measure(thresholds)
    found = Evaluator(wide, videos(), rules_of(replay, LAYERS)).measure(thresholds)
    assert found.nll == pytest.approx(expected.nll, rel=1e-5)
    assert found.ratios == expected.ratios
    assert found.shares == expected.shares
    assert len(set(found.shares)) == VIDEOS
    assert sum(found.shares) / VIDEOS == pytest.approx(found.replay)


def test_a_graph_that_reshapes_rows_in_another_way_keeps_its_batch(plain: DecoderProgram) -> None:
    source = deepcopy(plain)
    assert source.prefill is not None
    for node in source.prefill.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.as_strided.default
        node.args = (node.args[0], list(shape_of(node)), list(value_of(node).stride()))
    assert with_rows(source, VIDEOS) is source


def test_threads_share_the_batches(plain: DecoderProgram) -> None:
    rules = rules_of(fc.ReplayConfig(gate="input_delta"), LAYERS)
    evaluator, other = (Evaluator(plain, videos(), rules) for _ in range(2))
    thresholds, before = middle_thresholds(evaluator), torch.get_num_threads()
    torch.set_num_threads(2)
    found = other.measure(thresholds)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    expected = evaluator.measure(thresholds)
    assert (found.nll, found.shares) == (expected.nll, expected.shares)


def test_bad_videos(plain: DecoderProgram) -> None:
    replay = fc.ReplayConfig(gate="input_delta")
    coupled = replay.model_copy(update={"couple_cfg": True})
    for config, source, given, text in (
        (replay, plain, np.zeros((2, LENGTH + 1)), r"float64 \[2, 34\], expected int64 \[N, T\]"),
        (replay, plain, np.zeros((2, 9), np.int64), "videos of 9 tokens are too short; 11 are needed: a prompt of 1, "),
        (replay, plain, np.zeros((2, 40), np.int64), "videos of 40 tokens are too long for 33 positions"),
        (replay, plain, np.full((2, 20), -1), "token -1 at place 0 of video 0, and 39 more: not in the vocabulary"),
        (replay, rewritten(replay, chunk=9), videos(), "compile with a prefill_chunk of 2 to 8"),
        (coupled, rewritten(coupled), videos(), r"pairs video b with video b \+ N / 2, .* 3 videos in batches of 2"),
    ):
        with pytest.raises(InputError, match=text):
            Evaluator(source, given, rules_of(config, LAYERS))
