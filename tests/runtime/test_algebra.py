"""Sessions as values: tokens taken back, copies, files, and known tokens read at any position.

What is left goes on as a session that never did otherwise.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Made
from decoders import llama
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastcar_compile as fc
from fastcar_compile.errors import BackendError, InputError
from fastcar_compile.runtime.backends.base import Stepper

FRAME, LENGTH, ROWS = 5, 48, 2
EXACT: dict[str, Any] = {"quant": "w8a8", "kv": "int8", "numerics": "exact"}
KERNEL: dict[str, Any] = {"quant": "w8a8", "target": "zcu102"}
"""With whole decode steps on the accelerator."""

RING = fc.SparseAttention(window=7, sinks=2)
KINDS: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "exact rows": {**EXACT, "rows": 2},
    "exact ring": {**EXACT, "sparse_attention": RING},
    "bfloat16 ring": {"kv": "bfloat16", "sparse_attention": RING},
    "dense": {**EXACT, "replay": None},
    "kernel": KERNEL,
    "kernel rows": {**KERNEL, "rows": 2},
    "kernel ring": {**KERNEL, "sparse_attention": RING},
    "kernel mlp": {**EXACT, **KERNEL, "offload": "mlp"},
    "native": {},
    "native ring": {"sparse_attention": RING},
}
ON_KERNEL = [kind for kind in KINDS if "kernel" in kind]
NATIVE = ["native", "native ring"]
PLACES = [
    ("exact rows", "cpu"),
    pytest.param("bfloat16 ring", "onnxruntime", marks=pytest.mark.thorough),
    *[pytest.param(k, "cpu", marks=pytest.mark.thorough) for k in ("exact", "exact ring", "bfloat16 ring", "dense")],
    *[pytest.param(kind, "eager", marks=pytest.mark.thorough) for kind in KINDS if kind not in ON_KERNEL + NATIVE],
    *[pytest.param(kind, "hls-csim", marks=pytest.mark.thorough) for kind in ON_KERNEL],
]


Compiled = dict[str, fc.Artifact]
"""An artifact of each kind."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    def make(kind: str) -> fc.Artifact:
        options: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "batch_size": ROWS}
        options |= {"target": "cpu", "replay": fc.ReplayConfig(threshold=0.0, max_chain=2, refresh_every=4)}
        options |= {"prefill_chunk": 4 if kind in NATIVE else 1} | KINDS[kind]
        sizes = {"head_dim": 32} if kind in ON_KERNEL else {}
        return fc.compile(llama(**sizes), output=tmp_path_factory.mktemp("algebra") / "a", **options)

    return Made(make)


Part = tuple[str, int]
BEFORE: list[Part] = [("extend", 3), ("step", 11)]
AFTER: list[Part] = [("step", 12)]
"""A story in which chains end before and behind its middle, slots are replayed and rings are full."""
PARTS = st.lists(st.tuples(st.sampled_from(["extend", "step"]), st.integers(1, 9)), min_size=1, max_size=5)


def run(session: fc.Session, parts: list[Part], seed: int) -> list[Any]:
    """Logits and counts after each token that is decoded, and after each extension. A seed is a story of its own."""
    seen: list[Any] = []
    for kind, count in parts:
        at = session.position
        ids = np.random.default_rng(seed).integers(0, 17, (ROWS, LENGTH))[:, at : at + count]
        if not ids.size:
            continue
        if kind == "extend":
            seen.append(session.extend(ids))
            continue
        for token in ids.T:
            seen.append(session.step(np.ascontiguousarray(token)))
            seen.append(session.stats.decisions[-1])
    stats = session.stats
    return [*seen, session.position, stats.forwards, stats.eligible, np.array(stats.per_layer), stats.decisions]


def same(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("kind", "backend"), PLACES)
@settings(max_examples=4, deadline=None)
@given(first=PARTS, lost=PARTS, then=PARTS, inside=st.integers(0, 8))
@example(first=BEFORE, lost=[("step", 9)], then=AFTER, inside=0)
def test_what_is_taken_back_leaves_nothing(
    artifacts: Compiled, kind: str, backend: str, first: list[Part], lost: list[Part], then: list[Part],
    inside: int,
) -> None:  # fmt: skip
    """One by one and together, within an extension too."""
    with (
        artifacts[kind].session(backend, record=True, keep=LENGTH) as session,
        artifacts[kind].session(backend, record=True) as never,
    ):
        for one in (session, never):
            run(one, first, 1)
        before = session.position
        run(session, [*lost, ("extend", inside)] if inside else lost, 2)
        together, *single = [(session.position - before) // 2] + [1] * ((session.position - before + 1) // 2)
        for count in (*single, together):
            session.rewind(count)
        same(run(session, then, 3), run(never, then, 3))


@pytest.mark.parametrize(("kind", "backend"), PLACES)
@settings(max_examples=4, deadline=None)
@given(first=PARTS, left=PARTS, right=PARTS)
@example(first=BEFORE, left=AFTER, right=AFTER)
def test_a_fork_is_another_session(
    artifacts: Compiled, kind: str, backend: str, first: list[Part], left: list[Part], right: list[Part]
) -> None:
    session, one, two = (artifacts[kind].session(backend, record=True, keep=3) for _ in range(3))
    with session, one, two:
        for each in (session, one, two):
            run(each, first, 1)
        with session.fork() as fork:
            for each in (fork, two):
                each.set_threshold(None if kind == "dense" else -0.2)
            same(run(session, left, 2), run(one, left, 2))
            same(run(fork, right, 3), run(two, right, 3))
            back = min(3, fork.position)
            fork.rewind(back)
            two.rewind(back)
            same(run(fork, left, 4), run(two, left, 4))
        same(run(session, right, 5), run(one, right, 5))


@pytest.mark.parametrize(("kind", "backend"), PLACES)
@settings(max_examples=4, deadline=None)
@given(first=PARTS, then=PARTS)
@example(first=BEFORE, then=AFTER)
def test_a_saved_session_goes_on(
    tmp_path_factory: pytest.TempPathFactory, artifacts: Compiled, kind: str, backend: str,
    first: list[Part], then: list[Part],
) -> None:  # fmt: skip
    file = tmp_path_factory.mktemp("saved") / "session"
    with artifacts[kind].session(backend, record=True) as session:
        session.set_threshold(None if kind == "dense" else -0.2)
        run(session, first, 1)
        session.save(file)
        with artifacts[kind].session(backend, record=True) as other:
            run(other, then, 4)
            other.load(file)
            assert np.array_equal(other.thresholds, session.thresholds)
            same(run(other, then, 2), run(session, then, 2))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("exact rows", "cpu"),
        pytest.param("exact rows", "eager", marks=pytest.mark.thorough),
        pytest.param("kernel rows", "hls-csim", marks=pytest.mark.thorough),  # test_draft.py has its rows on every run
    ],
)
def test_prompts_of_different_lengths_decode_as_each_alone(
    kind: str, backend: str, tmp_path: Path, artifacts: Compiled
) -> None:
    """Row b is what both rows are where both have its prompt; copied, saved and extended on the way."""
    ids = np.random.default_rng(5).integers(0, 3, (ROWS, LENGTH))
    prompts = [ids[0, :9], ids[1, :2]]

    def story(session: fc.Session, given: Any, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        found, more = [session.prefill(given)], ids[rows, 9:]
        found += [session.step(more[:, t]) for t in range(8)]
        session.save(tmp_path / "half")
        session.reset()
        session.load(tmp_path / "half")
        found.append(session.extend(more[:, 8:14]))
        with session.fork() as other:
            found += [other.step(more[:, t]) for t in range(14, 27)]
            return np.stack(found), other.stats.decisions

    with artifacts[kind].session(backend, record=True) as session:
        logits, decisions = story(session, prompts, [0, 1])
        for row, prompt in enumerate(prompts):
            session.reset()
            alone, decided = story(session, np.stack([prompt] * ROWS), [row] * ROWS)
            assert (logits[:, row] == alone[:, row]).all()
            assert (decisions[:, :, row] == decided[:, :, row]).all()
            assert 0.1 < decided.mean() < 0.9
        found = session.generate([ids[0, :9], ids[1, :2]], 6)
        assert (found[1] == session.generate(np.stack([ids[1, :2]] * ROWS), 6)[1]).all()
    with artifacts[kind].session(backend, keep=3) as session:
        with pytest.raises(InputError, match="different positions"):
            session.prefill(prompts)
        session.prefill(ids[:, :3])  # what was refused leaves nothing behind
        session.rewind(1)


def test_only_what_was_kept_is_taken_back(artifacts: Compiled) -> None:
    with artifacts["exact rows"].session("cpu", record=True, keep=4) as session:
        run(session, [("extend", 6), ("step", 10)], 1)
        with pytest.raises(InputError, match=r"5 tokens cannot be taken back, only 4\n.*keep"):
            session.rewind(5)
        session.rewind(3)
        with pytest.raises(InputError, match="2 tokens cannot be taken back, only 1"):
            session.rewind(2)
        run(session, [("step", 2)], 2)
        session.rewind(3)
        session.reset()
        with pytest.raises(InputError, match="1 token cannot be taken back, only 0"):
            session.rewind(1)
    with artifacts["exact rows"].session("cpu", record=True) as session:
        run(session, [("extend", 6)], 1)
        with pytest.raises(InputError, match="the session keeps 0"):
            session.rewind(1)


def test_a_stepper_that_gives_no_states_is_refused_by_name(artifacts: Compiled) -> None:
    class Sealed(Stepper):
        def reset(self) -> None: ...
        def prefill(self, inputs: Any, position: int) -> Any: ...
        def decode(self, *_: Any, **__: Any) -> Any: ...

    refused = pytest.raises(BackendError, match="the states of Sealed cannot be copied nor set back")
    with artifacts["exact rows"].session(lambda artifact, options: Sealed()) as session:
        for call in (session.fork, lambda: session.save("file"), lambda: session.rewind(0)):
            with refused:
                call()
    with refused:
        artifacts["exact rows"].session(lambda artifact, options: Sealed(), keep=1)


# Known tokens at any position: one after the other as all at once, and what they mean for replay.


WITH_EXTENSIONS = ["exact", "exact rows", "exact ring", *NATIVE]
OFTEN = [("exact rows", "cpu")]
SELDOM = [*((kind, backend) for backend in ("cpu", "eager") for kind in WITH_EXTENSIONS)]
SELDOM += [(kind, "onnxruntime") for kind in NATIVE]
EXTENDING = [*OFTEN, *(pytest.param(*place, marks=pytest.mark.thorough) for place in SELDOM if place not in OFTEN)]


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 17, (ROWS, LENGTH))


def read(session: fc.Session, parts: list[Part], ids: np.ndarray) -> tuple[list[Any], list[Any]]:
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


def split(parts: list[Part], draw: Any) -> list[Part]:
    """The same with every extension in pieces."""
    found = []
    for kind, count in parts:
        while kind == "extend" and count > 1:
            piece = draw(st.integers(1, count))
            found.append((kind, piece))
            count -= piece
        found += [(kind, count)] if count else []
    return found


EXTENDED = st.lists(st.tuples(st.sampled_from(["extend", "step"]), st.integers(1, 9)), min_size=2, max_size=7).filter(
    lambda parts: parts[0][0] == "extend" and sum(count for _, count in parts) <= LENGTH
)


@pytest.mark.parametrize(("kind", "backend"), EXTENDING)
@settings(max_examples=4, deadline=None)
@given(parts=EXTENDED, data=st.data(), seed=st.integers(0, 99))
def test_all_at_once_or_one_after_the_other(
    artifacts: Compiled, kind: str, backend: str, parts: list[Part], data: Any, seed: int
) -> None:
    """Bit for bit with exact numerics, decisions always."""
    with artifacts[kind].session(backend, record=True) as session:
        whole = read(session, parts, tokens(seed))
        pieces = read(session, split(parts, data.draw), tokens(seed))
    tolerance = 0 if kind.startswith("exact") else 1e-4
    np.testing.assert_allclose(pieces[0][-1], whole[0][-1], atol=tolerance, rtol=0)
    for one, other in zip(pieces[1], whole[1], strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


@pytest.mark.parametrize(
    "kind", [k if k in dict(OFTEN) else pytest.param(k, marks=pytest.mark.thorough) for k in WITH_EXTENSIONS]
)
@settings(max_examples=4, deadline=None)
@given(parts=EXTENDED, seed=st.integers(0, 99))
def test_only_what_was_decoded_one_frame_earlier_is_replayed(
    artifacts: Compiled, kind: str, parts: list[Part], seed: int
) -> None:
    """At a threshold that every score passes: chains and refreshed frames apart, each such forward replays."""
    names = ["cpu", "onnxruntime" if kind.startswith("native") else "eager"]
    sessions = [artifacts[kind].session(backend, record=True) for backend in names]
    for session in sessions:
        session.set_threshold(-np.inf)
    found = [read(session, parts, tokens(seed))[1] for session in sessions]
    first = next((i for i, d in enumerate(found[0]) if d is not None), LENGTH)
    eligible = chain = 0
    chains = np.zeros(LENGTH, int)
    for at, decided in enumerate(found[0]):
        if decided is None:
            continue
        before = found[0][at - FRAME] if at - FRAME >= first else None
        eligible += before is not None
        chain = chains[at - FRAME] + 1 if at >= FRAME else 1
        allowed = before is not None and (at - first) // FRAME % 4 != 0 and chain <= 2
        assert decided.all() if allowed else not decided.any()
        chains[at] = chain if allowed else 0
    for session, other in zip(sessions, found, strict=True):
        for one, two in zip(found[0], other, strict=True):
            assert (one is None) == (two is None)
            assert one is None or np.array_equal(one, two)
        assert session.stats.eligible == eligible
        session.close()


def test_generation_goes_on(artifacts: Compiled) -> None:
    session = artifacts["exact rows"].session("cpu")
    session.set_threshold(None)
    prompt = tokens(1)[:, :6]
    whole = session.generate(prompt, 20)
    parts = [session.generate(prompt, 8)]
    parts.append(session.generate(parts[-1][:, -1:], 5, reset=False))
    parts.append(session.generate(parts[-1][:, -1:], 7, reset=False))
    assert np.array_equal(np.concatenate(parts, 1), whole)
    assert session.position == 6 + 19
    first = session.generate(prompt, 8)
    decoded = session.generate(first[:, -1:], 12, reset=False, decode=True)  # a forward of its own for the token
    assert np.array_equal(np.concatenate([first, decoded], 1), whole)
    assert session.stats.forwards == 7 + 1 + 11
    with pytest.raises(InputError, match=r"new video is not decoded(.|\n)*reset=False"):
        session.generate(prompt, 2, decode=True)
    with pytest.raises(InputError, match="1 prompt token and 24 new ones after 25 do not fit max_seq_len 48"):
        session.generate(parts[-1][:, -1:], 24, reset=False)
    with pytest.raises(InputError, match="after 25 tokens the extension adds 24 tokens, but max_seq_len is 48"):
        session.extend(tokens(1)[:, :24])
    with pytest.raises(InputError, match=r"already holds tokens\n.*extend\(\)"):
        session.prefill(prompt)
