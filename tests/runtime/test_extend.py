"""Known tokens at any position: one after the other as all at once, and what they mean for replay."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import llama
from hypothesis import given, settings
from hypothesis import strategies as st

import fastcar_compile as fc
from fastcar_compile.errors import InputError

FRAME, LENGTH, ROWS = 5, 48, 2
EXACT: dict[str, Any] = {"quant": "w8a8", "kv": "int8", "numerics": "exact"}
KINDS: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "exact rows": {**EXACT, "rows": 2},
    "exact ring": {**EXACT, "sparse_attention": fc.SparseAttention(window=7, sinks=2)},
    "native": {},
    "native ring": {"sparse_attention": fc.SparseAttention(window=7, sinks=2)},
}
# tests/runtime/test_algebra.py has stories of extensions too, over other kinds and backends.
OFTEN = [("exact rows", "cpu"), ("native ring", "cpu"), ("native ring", "onnxruntime")]
SELDOM = [(k, "cpu") for k in KINDS] + [(k, "eager") for k in KINDS] + [("native", "onnxruntime")]
PLACES = [*OFTEN, *(pytest.param(*place, marks=pytest.mark.thorough) for place in SELDOM if place not in OFTEN)]


class Compiled(dict[str, fc.Artifact]):
    """Artifacts by kind, each compiled when a test asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, kind: str) -> fc.Artifact:
        self[kind] = fc.compile(
            llama(), target="cpu", tokens_per_frame=FRAME, max_seq_len=LENGTH, batch_size=ROWS, prefill_chunk=4,
            replay=fc.ReplayConfig(threshold=0.0, max_chain=3, refresh_every=4), output=self._folder / kind,
            **KINDS[kind],
        )  # fmt: skip
        return self[kind]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("extend"))


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 17, (ROWS, LENGTH))


def run(session: fc.Session, parts: list[tuple[str, int]], ids: np.ndarray) -> tuple[list[Any], list[Any]]:
    """Logits after every part, and the decisions at every position; None where it was not decoded."""
    session.reset()
    logits, decisions = [], []
    for kind, count in parts:
        at = session.position
        if kind == "extend":
            logits.append(session.extend(ids[:, at : at + count]))
            decisions += [None] * count
            continue
        for i in range(count):
            logits.append(session.step(ids[:, at + i]))
            decisions.append(session.stats.decisions[-1])
    return logits, decisions


def split(parts: list[tuple[str, int]], draw: Any) -> list[tuple[str, int]]:
    """The same with every extension in pieces."""
    found = []
    for kind, count in parts:
        while kind == "extend" and count > 1:
            piece = draw(st.integers(1, count))
            found.append((kind, piece))
            count -= piece
        found += [(kind, count)] if count else []
    return found


PARTS = st.lists(st.tuples(st.sampled_from(["extend", "step"]), st.integers(1, 9)), min_size=2, max_size=7).filter(
    lambda parts: parts[0][0] == "extend" and sum(count for _, count in parts) <= LENGTH
)


@pytest.mark.parametrize(("kind", "backend"), PLACES)
@settings(max_examples=4, deadline=None)
@given(parts=PARTS, data=st.data(), seed=st.integers(0, 99))
def test_all_at_once_or_one_after_the_other(
    artifacts: dict[str, fc.Artifact], kind: str, backend: str, parts: list[tuple[str, int]], data: Any, seed: int
) -> None:
    """Bit for bit with exact numerics, decisions always."""
    with artifacts[kind].session(backend, record=True) as session:
        whole = run(session, parts, tokens(seed))
        pieces = run(session, split(parts, data.draw), tokens(seed))
    tolerance = 0 if kind.startswith("exact") else 1e-4
    np.testing.assert_allclose(pieces[0][-1], whole[0][-1], atol=tolerance, rtol=0)
    for one, other in zip(pieces[1], whole[1], strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


@pytest.mark.parametrize(
    "kind", [k if k in dict(OFTEN) else pytest.param(k, marks=pytest.mark.thorough) for k in KINDS]
)
@settings(max_examples=4, deadline=None)
@given(parts=PARTS, seed=st.integers(0, 99))
def test_only_what_was_decoded_one_frame_earlier_is_replayed(
    artifacts: dict[str, fc.Artifact], kind: str, parts: list[tuple[str, int]], seed: int
) -> None:
    """At a threshold that every score passes: chains and refreshed frames apart, each such forward replays."""
    names = ["cpu", "onnxruntime" if kind.startswith("native") else "eager"]
    sessions = [artifacts[kind].session(backend, record=True) for backend in names]
    for session in sessions:
        session.set_threshold(-np.inf)
    found = [run(session, parts, tokens(seed))[1] for session in sessions]
    first = next((i for i, d in enumerate(found[0]) if d is not None), LENGTH)
    eligible = chain = 0
    chains = np.zeros(LENGTH, int)
    for at, decided in enumerate(found[0]):
        if decided is None:
            continue
        before = found[0][at - FRAME] if at - FRAME >= first else None
        eligible += before is not None
        chain = chains[at - FRAME] + 1 if at >= FRAME else 1
        allowed = before is not None and (at - first) // FRAME % 4 != 0 and chain <= 3
        assert decided.all() if allowed else not decided.any()
        chains[at] = chain if allowed else 0
    for session, other in zip(sessions, found, strict=True):
        for one, two in zip(found[0], other, strict=True):
            assert (one is None) == (two is None)
            assert one is None or np.array_equal(one, two)
        assert session.stats.eligible == eligible
        session.close()


def test_generation_goes_on(artifacts: dict[str, fc.Artifact]) -> None:
    session = artifacts["exact"].session("cpu")
    session.set_threshold(None)
    prompt = tokens(1)[:, :6]
    whole = session.generate(prompt, 20)
    parts = [session.generate(prompt, 8)]
    parts.append(session.generate(parts[-1][:, -1:], 5, reset=False))
    parts.append(session.generate(parts[-1][:, -1:], 7, reset=False))
    assert np.array_equal(np.concatenate(parts, 1), whole)
    assert session.position == 6 + 19
    with pytest.raises(InputError, match="1 prompt token and 24 new ones after 25 do not fit max_seq_len 48"):
        session.generate(parts[-1][:, -1:], 24, reset=False)
    with pytest.raises(InputError, match="after 25 tokens the extension adds 24 tokens, but max_seq_len is 48"):
        session.extend(tokens(1)[:, :24])
    with pytest.raises(InputError, match=r"already holds tokens\n.*extend\(\)"):
        session.prefill(prompt)
