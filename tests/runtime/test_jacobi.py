"""Coupled Jacobi decoding is sequential decoding: tokens, decisions, states and counts, on every backend."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import Made, check_module, first_often
from decoders import llama
from gates.drafts import random_draft
from gates.networks import networks
from hypothesis import given, settings
from hypothesis import strategies as st

import fastcar_compile as fc
from fastcar_compile.config.models import Jacobi
from fastcar_compile.errors import CompileError, InputError
from fastcar_compile.runtime.backends.accelerator.calls import ComputeUnit
from fastcar_compile.runtime.backends.accelerator.step import StepStepper
from fastcar_compile.runtime.forwards import WindowChoice
from fastcar_compile.runtime.sampling import TokenChoice

FRAME, LENGTH, PROMPT = 10, 64, 13
EXACT: dict[str, Any] = {"quant": "w8a8", "kv": "int8", "numerics": "exact"}
BOARD: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "offload": "all"}
RING = "exact ring and chains"
KINDS: dict[str, dict[str, Any]] = {
    "native": {"prefill_chunk": 4},
    "native w8a8": {"quant": "w8a8", "kv": "int8", "numerics": "native"},
    "native w4a8": {"quant": "w4a8", "kv": "int8", "numerics": "native"},
    "native avx2": {"quant": "w8a8", "kv": "int8", "numerics": "native", "host_cpus": ["avx2"]},
    "native sse4": {"host_cpus": ["sse4"]},
    "exact": EXACT,
    RING: EXACT
    | {
        "sparse_attention": fc.SparseAttention(window=14, sinks=2),
        "replay": fc.ReplayConfig(threshold=-0.5, max_chain=2, refresh_every=4),
    },
    "exact board": BOARD | {"replay": fc.ReplayConfig(threshold=-0.5, max_chain=2, refresh_every=4)},
    "draft board": BOARD | {"replay": fc.ReplayConfig(draft=random_draft(64), threshold=0.5, max_chain=2)},
    "learned board": BOARD
    | {"replay": fc.ReplayConfig(gate="learned", threshold=0.0, gate_weights=networks(64, 3, 7))},
    "exact dense": EXACT | {"replay": None},
}
BACKENDS = first_often(
    [
        *[("cpu", RING), ("hls-csim", "draft board"), ("cpu", "native")],
        *[("cpu", "exact"), ("eager", "exact"), ("cpu", "exact dense"), ("eager", "native"), ("onnxruntime", "native")],
        *[("cpu", "native w8a8"), ("cpu", "native w4a8"), ("cpu", "native avx2"), ("cpu", "native sse4")],
        *[("hls-csim", "exact board"), ("hls-csim", "learned board")],
    ],
    3,
)


def build(folder: Path, kind: str, rows: int | None, batch_size: int = 1) -> fc.Artifact:
    sizes = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "batch_size": batch_size, "rows": rows}
    options = {"target": "cpu", "replay": fc.ReplayConfig(threshold=0.0), "prefill_chunk": 1} | KINDS[kind]
    return fc.compile(llama(head_dim=32), **options, **sizes, output=folder)


Built = dict[tuple[str, int | None, int], fc.Artifact]
"""By kind, rows and batch size."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Made(lambda key: build(tmp_path_factory.mktemp("jacobi") / "a", *key))


def prompt(seed: int = 4, rows: int = 1, length: int = PROMPT) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 17, (rows, length))


def everything(session: fc.Session, folder: Path) -> bytes:
    """What a session holds: its saved states and counts."""
    session.save(folder / "session")
    return (folder / "session").read_bytes()


@pytest.mark.parametrize(("backend", "kind"), BACKENDS)
def test_every_window_gives_what_sequential_decoding_gives(
    built: Built, backend: str, kind: str, tmp_path: Path
) -> None:
    check_module("hls4ml")
    session, sampling = built[kind, 4, 1].session(backend, record=True), fc.Sampling(0.8, 9, seed=5)
    # Native kernels of a decoder of one row sum in another order; those of one decoder do not.
    rows = 4 if backend == "hls-csim" or (backend == "cpu" and kind.startswith("native")) else None
    alone = built[kind, rows, 1].session("cpu" if backend == "hls-csim" else backend, record=True)
    expected = alone.generate(prompt(), 45, sampling)
    found = session.generate(prompt(), 45, sampling, jacobi=Jacobi(1))
    np.testing.assert_array_equal(found, expected)
    held = everything(session, tmp_path)
    assert KINDS[kind].get("replay", 1) is None or 0.05 < session.stats.replay_ratio < 0.9
    windows: tuple[Any, ...] = (2, 4, "auto")  # and 3 in the walks
    for window in windows:
        np.testing.assert_array_equal(session.generate(prompt(), 45, sampling, jacobi=Jacobi(window)), expected)
        assert session.stats.forwards == 44
        assert window == "auto" or session.stats.steps < 44
        np.testing.assert_array_equal(session.stats.decisions, alone.stats.decisions)
        assert everything(session, tmp_path) == held


def test_of_the_first_step_only_what_is_taken_back_goes(built: Built, tmp_path: Path) -> None:
    sampling, held = fc.Sampling(1.0, 9, seed=1245738079), list[bytes]()
    session = built[RING, 4, 1].session("cpu", keep=6)
    for window in (1, 4):
        session.generate(prompt(79), 3, sampling, jacobi=Jacobi(window))
        assert session.stats.steps == (2 if window == 1 else 1)
        session.rewind(1)
        held.append(everything(session, tmp_path))
    assert held[0] == held[1]


@contextmanager
def watched(unit: ComputeUnit) -> Iterator[list[Mock]]:
    """What records the buffers that are read and written."""
    mocks = [Mock(side_effect=unit.read), Mock(side_effect=unit.write)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit, "read", mocks[0])
        patch.setattr(unit, "write", mocks[1])
        yield mocks


def test_an_accelerator_commits_nothing_of_wrong_guesses(built: Built, tmp_path: Path) -> None:
    """No state travels but where it is asked for; then, amid a video, it is that of sequential decoding."""
    check_module("hls4ml")
    artifact = built["draft board", 4, 1]
    session, alone = artifact.session("hls-csim"), artifact.session("cpu")
    unit = cast(StepStepper, session._run.stepper)._kernel.unit
    for seed, last in ((1, 19), (2, 30), (3, 41)):
        draws = fc.Sampling(1.0, 9, seed=seed).start(prompt())

        def keyed(logits: Any, position: int, draws: Any = draws, last: int = last) -> Any:
            if position == last:
                raise ZeroDivisionError
            return draws(logits, position)

        held = list[bytes]()
        for one, window in ((alone, 1), (session, 4)):
            with watched(unit) as mocks, pytest.raises(ZeroDivisionError):
                one.generate(prompt(), 40, keyed, jacobi=Jacobi(window))
            names = {call.args[0] for mock in mocks for call in mock.mock_calls}
            assert names <= {"inputs", "outputs", "step_report"}
            held.append(everything(one, tmp_path))
        assert held[0] == held[1]
    with fc.Batcher(artifact, "hls-csim") as batcher:
        for seed in (1, 2):
            sampling = fc.Sampling(0.9, 9, seed=seed)
            assert [list(batcher.submit(prompt()[0], 30, sampling).result(60))] == alone.generate(
                prompt(), 30, sampling
            ).tolist()


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**64 - 1), kind=st.sampled_from(["exact", "exact ring and chains"]))
def test_any_walk_through_a_video(built: Built, data: st.DataObject, seed: int, kind: str) -> None:
    """Extensions, rewinds and forks in between change nothing."""
    artifact, sampling = built[kind, 4, 1], fc.Sampling(1.0, 9, seed=seed)
    sessions = [artifact.session(keep=6, record=True) for _ in range(2)]
    ids = prompt(seed % 1000)
    tokens = [s.generate(ids, 3, sampling, jacobi=Jacobi(w)) for s, w in zip(sessions, (1, 4), strict=True)]
    for _ in range(4):
        room = LENGTH - sessions[0].position
        if room < 12:
            break
        back = data.draw(st.integers(0, 2))
        window: Any = data.draw(st.sampled_from([2, 3, 4, "auto"]))
        count = data.draw(st.integers(1, min(9, room - 3)))
        known = prompt(seed % 999, length=data.draw(st.integers(1, 3)))
        for s in sessions:
            s.rewind(min(back, 2))
        tokens = [
            s.generate(known, count, sampling, reset=False, jacobi=Jacobi(w))
            for s, w in zip(sessions, (1, window), strict=True)
        ]
        np.testing.assert_array_equal(*tokens)
        one, other = (s.stats.decisions for s in sessions)
        np.testing.assert_array_equal(one, other)
        if data.draw(st.booleans()):
            sessions = [s.fork() for s in sessions]
    np.testing.assert_array_equal(*(s.step(np.array([3])) for s in sessions))


def test_videos_of_a_batch_and_pairs(built: Built) -> None:
    """Each video stops at its own wrong guess; guidance and a penalty know what each row has read."""
    session = built[RING, 4, 2].session()
    for sampling in (
        fc.Sampling(0.9, 9, seed=1), fc.Sampling(guidance=2.0, exact=True), fc.Sampling(0.7, repetition_penalty=1.7)
    ):  # fmt: skip
        expected = session.generate(prompt(rows=2), 40, sampling, jacobi=Jacobi(1))
        for window in (2, 4):
            found = session.generate(prompt(rows=2), 40, sampling, jacobi=Jacobi(window))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("behind", [6, -1, -2])
def test_prompts_of_different_lengths(built: Built, behind: int, tmp_path: Path) -> None:
    """Guesses are taken back where each video has them."""
    artifact, sampling, held = built[RING, 4, 2], fc.Sampling(seed=2), list[bytes]()
    ring = next(state.shape[2] - 2 for state in artifact.state if state.role == "key_cache")  # without its sinks
    ids = prompt(length=7 + (behind if behind > 0 else ring + behind))[0]
    with artifact.session() as session:
        found = list[Any]()
        for window in (1, 4):
            found.append(session.generate([ids, ids[:7]], 64 - len(ids), sampling, jacobi=Jacobi(window)))
            held.append(everything(session, tmp_path))
    np.testing.assert_array_equal(*found)
    assert held[0] == held[1]


def test_a_caller_s_sampler_needs_the_position(built: Built) -> None:
    session = built[RING, 4, 1].session()
    draws = fc.Sampling(0.9, seed=3).start(prompt())

    def keyed(logits: Any, position: int) -> Any:
        return draws(logits, position)

    expected = session.generate(prompt(), 30, keyed, jacobi=Jacobi(1))
    np.testing.assert_array_equal(session.generate(prompt(), 30, keyed, jacobi=Jacobi(4)), expected)
    with pytest.raises(InputError, match=r"sampler takes logits alone(.|\n)*a parameter `position`"):
        session.generate(prompt(), 30, lambda logits: logits.argmax(-1), jacobi=Jacobi(4))
    assert session.generate(prompt(), 3, lambda logits: logits.argmax(-1), jacobi=Jacobi(1)).shape == (1, 3)


def test_the_artifact_keeps_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "replay": None, "prefill_chunk": 1}
    model = llama(num_hidden_layers=1)
    artifact = fc.compile(model, jacobi=fc.Jacobi(3), **options, output=tmp_path / "a")
    loaded = fc.load(artifact.path)
    assert loaded.config.rows == 3
    assert loaded.manifest.options.jacobi == fc.Jacobi(3)
    assert "Jacobi, window 3" in repr(loaded.session())
    assert "order: Jacobi, window 3" in loaded.explain()
    session = loaded.session()
    session.generate(prompt(), 30)
    assert session.stats.steps < 29
    assert session.stats.tokens_per_step == 29 / session.stats.steps
    with pytest.raises(
        InputError, match=r"window of 4 needs as many rows of each video, the decoder has 3(.|\n)*rows=4"
    ):
        session.generate(prompt(), 4, jacobi=Jacobi(4))
    gone: dict[str, Any] = options | {"wavefront": None}
    with pytest.raises(CompileError, match=r"wavefront(.|\n)*use jacobi"):
        fc.compile(model, **gone, output=tmp_path / "b")
    with pytest.raises(CompileError, match="window of 11 is longer than a frame of 10"):
        fc.compile(model, jacobi=Jacobi(11), **options, output=tmp_path / "b")


def test_the_window_follows_what_steps_take_and_give() -> None:
    def settle(window: WindowChoice, cost: float, right: float, room: int = 16, steps: int = 300) -> int:
        random, widths = np.random.default_rng(0), list[int]()
        for _ in range(steps):
            width = window(room)
            accepted = 1
            while accepted < width and random.random() < right:
                accepted += 1
            window.add(width, accepted, 1 + cost * (width - 1))
            widths.append(width)
        return int(np.median(widths[-100:]))

    assert settle(WindowChoice(Jacobi("auto"), 16), cost=1.0, right=0.9) == 1  # rows cost what they give at most
    assert settle(WindowChoice(Jacobi("auto"), 16), cost=0.01, right=0.98) == 16
    assert settle(WindowChoice(Jacobi("auto"), 16), cost=1.0, right=0.9, room=7) == 1  # calls that end before a window
    turning = WindowChoice(Jacobi("auto"), 16)
    assert settle(turning, cost=0.05, right=0.97) == 16
    assert settle(turning, cost=0.3, right=0.1) <= 2
    assert settle(turning, cost=0.05, right=0.97) >= 8
    assert [WindowChoice(Jacobi(8), 5)(9) for _ in range(3)] == [5] * 3


def test_draws_are_compiled(built: Built) -> None:
    """Those of a decoder's own library, and none in Python; but for what Python alone defines."""
    found = list[Any]()
    for sampling in (fc.Sampling(0.8, 9, seed=5), fc.Sampling(0.8, 9, top_p=0.99, seed=5)):
        with pytest.MonkeyPatch.context() as patch:
            drawn = Mock(side_effect=TokenChoice._drawn, autospec=True)
            patch.setattr(TokenChoice, "_drawn", lambda *given, own=drawn: own(*given))
            session = built["exact", 4, 1].session()
            found.append((session.generate(prompt(), 20, sampling).shape, drawn.call_count > 0))
    assert found == [((1, 20), False), ((1, 20), True)]
