"""`Sampling` against Transformers' own processors, its draws, and logits that are not finite."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from fastcar_compile.errors import InputError
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.backends.base import Stepper, StepResult
from fastcar_compile.runtime.sampling import Sampling
from fastcar_compile.runtime.session import Session

SEEN = np.array([[3, 4, 3], [0, 16, 2]])


def logits(rows: int = 2) -> np.ndarray:
    return 3 * np.random.default_rng(0).standard_normal((rows, 17)).astype(np.float32)


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (Sampling(), []),
        (Sampling(temperature=0.7), [hf.TemperatureLogitsWarper(0.7)]),
        (Sampling(top_k=3), [hf.TopKLogitsWarper(3)]),
        (Sampling(top_k=40), [hf.TopKLogitsWarper(40)]),
        (Sampling(top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
        (Sampling(top_p=1e-6), [hf.TopPLogitsWarper(1e-6)]),
        (Sampling(repetition_penalty=1.5), [hf.RepetitionPenaltyLogitsProcessor(1.5)]),
        (
            Sampling(temperature=1.3, top_k=7, top_p=0.9, repetition_penalty=0.6),
            [
                hf.RepetitionPenaltyLogitsProcessor(0.6), hf.TemperatureLogitsWarper(1.3), hf.TopKLogitsWarper(7),
                hf.TopPLogitsWarper(0.9),
            ],
        ),
    ],
)  # fmt: skip
def test_scores_are_those_of_transformers(sampling: Sampling, processors: list[hf.LogitsProcessor]) -> None:
    expected = torch.from_numpy(logits())
    for processor in processors:
        expected = processor(torch.LongTensor(SEEN), torch.FloatTensor(expected))
    np.testing.assert_allclose(sampling.scores(logits(), SEEN), expected.numpy(), atol=1e-6)


def test_guidance_is_the_weighted_difference_of_log_probabilities() -> None:
    both = torch.from_numpy(logits(4)).log_softmax(-1)
    expected = both[2:] + 3 * (both[:2] - both[2:])
    scores = Sampling(guidance=3).scores(logits(4), SEEN)
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
    tokens = Sampling(temperature=0, guidance=3).start(np.zeros((4, 1), np.int64))(logits(4))
    assert tokens.tolist() == expected.argmax(-1).tolist() * 2


def test_draws_follow_the_probabilities() -> None:
    sampling, one = Sampling(temperature=2.0, top_k=4, seed=5), logits(1)
    scores = sampling.scores(one, SEEN[:1])[0]
    expected = torch.from_numpy(scores).softmax(-1).numpy()
    drawn = sampling.start(np.zeros((20_000, 1), np.int64))(np.repeat(one, 20_000, 0))
    assert np.abs(np.bincount(drawn, minlength=17) / 20_000 - expected).max() < 0.02


def test_a_row_draws_the_same_among_few_tokens_as_among_all() -> None:
    """With top_k alone the tokens that are left out are not summed. Equal logits at its edge stay in."""
    sampling, random = Sampling(temperature=0.8, top_k=9, seed=3), np.random.default_rng(4)
    quick, whole = sampling.start(SEEN[:1]), sampling.start(SEEN[:1])
    rows = np.round(3 * random.standard_normal((400, 1, 60)), 1).astype(np.float32)
    for row in rows:
        assert sampling.few(row) == 9
        assert quick(row) == whole._drawn(sampling.scores(row, SEEN[:1]))
    assert [Sampling(top_k=k).few(rows[0]) for k in (59, 60)] == [59, None]
    others = [
        Sampling(),
        Sampling(top_k=3, top_p=0.9),
        Sampling(top_k=3, repetition_penalty=2),
        Sampling(temperature=0),
    ]
    assert [other.few(rows[0]) for other in others] == [None] * 4
    assert sampling.few(logits(2)) is None


def test_a_token_that_was_drawn_is_penalised_next() -> None:
    choose = Sampling(temperature=0, repetition_penalty=1000.0).start(np.array([[1]]))
    scores = np.array([[5.0, 9.0, 4.0]], np.float32)
    assert [int(choose(scores)[0]) for _ in range(3)] == [0, 2, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "the temperature is -1.0"),
        ({"temperature": 1e-310}, "the temperature is 1e-310"),  # logits divided by it are infinite
        ({"top_k": 0}, "the top_k is 0"),
        ({"top_p": 0.0}, "the top_p is 0.0"),
        ({"repetition_penalty": 0.0}, "the repetition_penalty is 0.0"),
        ({"guidance": float("nan")}, "the guidance is NaN"),
        ({"seed": -1}, "the seed is -1"),
        ({"temperature": 0.0, "top_k": 3}, "at temperature 0 nothing is drawn"),
    ],
)
def test_a_bad_value_is_named(options: dict[str, float], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Sampling(**options)  # pyright: ignore[reportArgumentType]  # the values are the test's


def test_guidance_needs_pairs() -> None:
    with pytest.raises(InputError, match="there are 3 rows"):
        Sampling(guidance=2.0).start(np.zeros((3, 1), np.int64))


# Logits that are not finite.

INF, NAN = np.inf, np.nan
FORBIDDEN = [
    {}, {"temperature": 0.0}, {"temperature": 0.01}, {"temperature": 1e6}, {"top_k": 1}, {"top_k": 2}, {"top_k": 4},
    {"top_p": 0.5}, {"top_p": 1.0}, {"repetition_penalty": 1e308}, {"repetition_penalty": 1e-308},
    {"repetition_penalty": 3.0, "top_k": 2, "top_p": 0.9}, {"exact": True}, {"exact": True, "top_k": 4},
]  # fmt: skip
PAIRED = [{"guidance": g} | other for g in (2.5, -1.0, 0.0, 0.5, 1e308) for other in ({}, {"temperature": 0.0})]
PAIRED += [{"guidance": 3.0, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.5}]


def drawn(options: dict[str, Any], rows: list[list[float]], count: int = 60) -> set[tuple[int, ...]]:
    """The choices of a new video for each seed."""
    given, prompt = np.array(rows, np.float32), np.zeros((len(rows), 1), np.int64)
    seeds = [{}] if options.get("temperature") == 0 else [{"seed": seed} for seed in range(count)]
    return {tuple(Sampling(**options, **seed).start(prompt)(given).tolist()) for seed in seeds}


@pytest.mark.parametrize("options", FORBIDDEN)
def test_a_forbidden_token_is_never_drawn(options: dict[str, Any]) -> None:
    """In a row alone, which top_k draws in a way of its own, and in one of two."""
    assert {t for (t,) in drawn(options, [[-INF, 0.5, -INF, 0.25, -INF]])} <= {1, 3}
    assert {pair[1] for pair in drawn(options, [[1, 2, 3, 4, 5], [-INF, -1e30, -INF, -INF, -INF]])} == {1}


@pytest.mark.parametrize("options", PAIRED)
def test_a_token_that_one_of_a_pair_forbids_is_never_drawn(options: dict[str, Any]) -> None:
    pair = [[-INF, 1.0, 2.0, -INF, 1.5], [-INF, 0.5, -INF, 3.0, 1.0]]
    assert drawn(options, pair) <= {(1, 1), (4, 4)}
    scores = Sampling(**options).scores(np.array(pair, np.float32), np.zeros((1, 1), np.int64))
    assert not np.isnan(scores).any()
    assert np.isneginf(scores[0, [0, 2, 3]]).all()


@pytest.mark.parametrize("options", [options for options in FORBIDDEN if options.get("top_p") != 0.5])
def test_infinite_logits_are_equally_probable(options: dict[str, Any]) -> None:
    found = {t for (t,) in drawn(options, [[1.0, INF, -INF, 88.0, INF]])}
    assert found == ({1} if options.get("temperature") == 0 else {1, 4})
    assert drawn(options, [[1.0, INF, 3.0]], 3) == {(1,)}


def test_an_infinite_logit_of_a_pair_is_drawn() -> None:
    assert drawn({"guidance": 2.0}, [[1.0, INF, 3.0], [0.0, 1.0, 2.0]], 9) == {(1, 1)}


@pytest.mark.parametrize("options", [*FORBIDDEN, *PAIRED])
@pytest.mark.parametrize(("value", "text"), [(NAN, "the logit of token 2 is NaN"), (-INF, "of all tokens are -inf")])
def test_what_cannot_be_drawn_is_named(options: dict[str, Any], value: float, text: str) -> None:
    choose = Sampling(**options).start(np.zeros((2, 7), np.int64))
    choose(logits()[:, :3])
    bad = np.array([[1, 0, 2], [1, 0, 2]], np.float32)
    bad[1, [2] if np.isnan(value) else slice(None)] = value
    with pytest.raises(InputError, match=f"row 1, position 7: .*{text}"):
        choose(bad)
    if options.get("guidance", 1) == 1:
        with pytest.raises(InputError, match=f"row 0, position 0: .*{text}"):
            Sampling(**options).start(np.zeros((1, 1), np.int64))(bad[1:])


def test_a_pair_that_allows_no_token_is_named() -> None:
    with pytest.raises(InputError, match=r"row 0, position 0: .*-inf\n.*guidance"):
        drawn({"guidance": 2.0}, [[1.0, -INF], [-INF, 1.0]])


def test_a_penalty_that_leaves_no_token_is_no_fault_of_the_logits() -> None:
    choose = Sampling(temperature=0, repetition_penalty=1e308).start(np.array([[0, 1, 2]]))
    with pytest.raises(InputError, match=r"the scores of all tokens are -inf\n.*a penalty"):
        choose(np.array([[-5, -3, -4]], np.float32))


class Given(Stepper):
    """Logits that depend on the position: all zero, but for the changes."""

    def __init__(self, changes: dict[tuple[int, int], list[float]]) -> None:
        self.prefill_chunk, self._changes = 1, changes

    def reset(self) -> None: ...

    def _at(self, position: Any) -> np.ndarray:
        places = np.broadcast_to(position, ROWS)
        return np.array([self._changes.get((row, int(p)), [0.0] * 5) for row, p in enumerate(places)], np.float32)

    def prefill(self, inputs: Any, position: int) -> Any:
        return self._at(position)[:, None]

    def decode(self, inputs: Any, position: Any, step: Any, thresholds: Any, spans: Any = None) -> StepResult:
        return StepResult.of({"logits": self._at(position)[:, None]}, LAYERS)


ROWS, LAYERS = 2, 1


def over(changes: dict[tuple[int, int], list[float]]) -> Session:
    return Session(Given(changes), DecoderConfig(ROWS, 24, 4, LAYERS, 64, 5, False, 1), [None])


@pytest.mark.parametrize("sample", [None, Sampling(temperature=0), Sampling(seed=1), Sampling(guidance=2.0)])
@pytest.mark.parametrize("position", [2, 6])
def test_a_session_names_row_and_position(sample: Sampling | None, position: int) -> None:
    """The last position of the prompt, and one that is decoded; also of a video that goes on."""
    bad, prompt = [0.0, NAN, 0, 0, 0], np.zeros((ROWS, 3), np.int64)
    with pytest.raises(InputError, match=f"row 1, position {position}: the logit of token 1 is NaN"):
        over({(1, position): bad}).generate(prompt, 9, sample)
    session = over({(1, position + 9): bad})
    session.generate(prompt, 7, sample)
    with pytest.raises(InputError, match=f"row 1, position {position + 9}"):
        session.generate(prompt, 9, sample, reset=False)
