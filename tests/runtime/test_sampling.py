"""`Sampling` against Transformers' own processors, and its draws."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from fastcar_compile.errors import InputError
from fastcar_compile.runtime.sampling import Sampling

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
