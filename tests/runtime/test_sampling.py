"""`Sampling` against Transformers' own processors, its draws, and logits that are not finite."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from fastcar_compile.errors import InputError
from fastcar_compile.ir.draws import Noise, gumbel, philox
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
    for penalty in (1.0, 1.5):  # a penalty needs log probabilities; without one a row has a constant of its own
        scores = torch.from_numpy(Sampling(guidance=3, repetition_penalty=penalty).scores(logits(4), SEEN))
        held = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.LongTensor(SEEN), torch.FloatTensor(expected))
        np.testing.assert_allclose(scores.log_softmax(-1), held.log_softmax(-1), atol=1e-5)
    tokens = Sampling(temperature=0, guidance=3).start(np.zeros((4, 1), np.int64))(logits(4))
    assert tokens.tolist() == expected.argmax(-1).tolist() * 2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=5), Sampling(2.0, 4, seed=5), Sampling(0.6, seed=5), Sampling(top_p=0.8, seed=5),
        Sampling(top_k=9, seed=5, exact=True),
    ],
)  # fmt: skip
def test_draws_follow_the_probabilities(sampling: Sampling) -> None:
    """A chi-square test over positions of one sequence, and over sequences at one position."""
    one = logits(1)
    scores = sampling.scores(one, SEEN[:1])[0]
    expected = torch.from_numpy(scores).softmax(-1).numpy() * DRAWS
    choose = sampling.start(np.zeros((1, 1), np.int64))
    over_positions = np.concatenate([choose(one, position) for position in range(DRAWS)])
    over_rows = sampling.start(np.zeros((DRAWS, 1), np.int64))(np.repeat(one, DRAWS, 0))
    for drawn in (over_positions, over_rows):
        found = np.bincount(drawn, minlength=17)
        kept = expected > 5
        assert not found[expected == 0].any()
        counts = np.array([[*n[kept], n[~kept].sum() + 1] for n in (found, expected)])
        distance = ((counts[0] - counts[1]) ** 2 / counts[1]).sum()
        # The probability of a larger chi-square.
        assert torch.special.gammaincc(torch.tensor(kept.sum() / 2), torch.tensor(distance / 2)) > 0.001


DRAWS = 20_000


@pytest.mark.parametrize("top_k", [None, 9, 40])
@pytest.mark.parametrize("paired", [False, True])
def test_a_draw_depends_on_seed_row_and_position_alone(top_k: int | None, paired: bool) -> None:
    """One by one, several at once, backwards and again give the same tokens; other seeds and positions give others."""
    random, prompt = np.random.default_rng(4), np.zeros((4, 1), np.int64)
    rows = np.round(3 * random.standard_normal((4, 30, 60)), 1).astype(np.float32)
    options: dict[str, Any] = {"temperature": 0.8, "top_k": top_k, "guidance": 2.0 if paired else 1.0, "exact": True}
    choose = Sampling(**options, seed=3).start(prompt)
    expected = np.stack([choose(rows[:, k], 7 + k) for k in range(30)], 1)
    again = Sampling(**options, seed=3).start(prompt)
    for k in (29, 3, 3, 0):
        assert again(rows[:, k], 7 + k).tolist() == expected[:, k].tolist()
    for first, count in ((0, 8), (5, 8), (2, 16), (13, 16)):
        found = again.several(rows[:, first : first + count], 7 + first, np.zeros((4, count), np.int64))
        np.testing.assert_array_equal(found, expected[:, first : first + count])
    other = Sampling(**options, seed=3 + 2**40).start(prompt)
    assert (np.stack([other(rows[:, k], 7 + k) for k in range(30)], 1) != expected).mean() > 0.1
    flat = np.zeros((4, 60), np.float32)
    assert len({tuple(choose(flat, k)) for k in range(30)}) > 20
    assert len(set(Sampling(seed=3).start(prompt)(flat, 7).tolist())) > 1


def test_the_choice_among_few_is_that_of_the_limited_scores() -> None:
    """Counting larger scores replaces a partition; equal scores at the edge all stay in."""
    random, sampling = np.random.default_rng(4), Sampling(top_k=9, seed=3)
    choose, noise = sampling.start(SEEN[:1]), Noise(3, 1, 60)
    for position in range(400):
        row = np.round(2 * random.standard_normal((1, 60)), 1).astype(np.float32)
        limited = sampling.scores(row, SEEN[:1]) * np.log2(np.e) + noise(position)[0]
        assert choose(row, position) == limited.argmax()


def test_philox_is_that_of_its_authors() -> None:
    """The known answers of Random123."""
    every = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    cases = {
        (0, (0, 0, 0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (2**64 - 1, (every,) * 4): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (0x299F31D0A4093822, pi): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (key, (a, b, c, d)), words in cases.items():
        found = philox(key, (np.array([a], np.uint64), np.array([b], np.uint64), *np.array([[c], [d]], np.uint64)))
        assert " ".join(f"{int(word[0]):08x}" for word in found) == words


def test_noise_is_a_gumbel_variable() -> None:
    """The interpolated table against its formula, in the tails too; no libm can round an entry in another way."""
    words = np.unique(np.concatenate([np.geomspace(1, 2**32 - 1, 20_001), 2**32 - np.geomspace(1, 2**31, 20_001)]))
    words = words.astype(np.uint32)
    share = (words | np.uint32(1)) / 2.0**32
    expected = -np.log2(-np.log1p(-share) / np.log(2))
    inner = share < 1 - 2**-6
    np.testing.assert_allclose(gumbel(words)[inner], expected[inner], atol=2e-5)
    np.testing.assert_allclose(gumbel(words)[~inner], expected[~inner], atol=1.0)  # steep
    octave, part = np.divmod(np.arange(32 * 2048), 2048)
    knots = -np.log2(-np.log1p(-np.ldexp(1 + part / 2048, octave - 32)) / np.log(2)) * 2**20
    assert np.abs(knots - np.floor(knots) - 0.5).min() > 1e-7


def test_a_later_row_of_several_that_cannot_be_drawn_is_left_out() -> None:
    """It may have read a wrong guess. As the first one it is named, with its position."""
    choose = Sampling(seed=1, repetition_penalty=2.0).start(SEEN[:1])
    rows = np.repeat(logits(1)[:, None], 4, 1)
    rows[0, 2, 3] = np.nan
    read = np.zeros((1, 4), np.int64)
    expected = choose.several(rows[:, :1], 2, read[:, :1])
    assert choose.several(rows, 2, read).tolist() == expected.tolist()
    with pytest.raises(InputError, match="row 0, position 4: the logit of token 3 is NaN"):
        choose.several(rows[:, 2:], 4, read[:, 2:])


def test_several_rows_are_penalised_for_what_each_has_read() -> None:
    choose = Sampling(temperature=0, repetition_penalty=1000.0).start(np.array([[1]]))
    rows = np.repeat(np.array([[[5.0, 9.0, 4.0, 1.0]]], np.float32), 3, 1)
    assert choose(rows[:, 0], 0).tolist() == [0]
    assert choose.several(rows, 1, np.array([[0, 3, 2]])).tolist() == [[2, 2, 1]]
    assert choose.several(rows[:, :2], 2, np.array([[2, 3]])).tolist() == [[3, 1]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "the temperature is -1.0"),
        ({"temperature": 1e-310}, "the temperature is 1e-310"),  # logits divided by it are infinite
        ({"guidance": float("nan")}, "the guidance is NaN"),
        ({"seed": 2**64}, "the seed is a number of many digits"),
        ({"exact": True, "top_p": 0.5}, "exact draws have neither top_p"),
        ({"exact": True, "guidance": 2.0, "repetition_penalty": 2.0}, "nor a repetition_penalty beside guidance"),
        ({"temperature": 0.0, "top_k": 3}, "at temperature 0 nothing is drawn"),
    ],
)
def test_a_bad_value_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Sampling(**options)


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
    seeds: list[dict[str, Any]] = [{"seed": seed} for seed in range(1 if options.get("temperature") == 0 else count)]
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

    def decode(self, inputs: Any, position: Any, step: Any, thresholds: Any) -> StepResult:
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
