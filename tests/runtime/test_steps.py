"""What a step may not do: allocate, move state or weights, or depend on the number of threads."""

from __future__ import annotations

import gc
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from lowering.programs import FRAME, LAYERS, LENGTH, Case, cpu_backend, export, program, tokens

from fastcar_compile.artifact.store import load_tensors
from fastcar_compile.artifact.tensor_files import LazyTensors, write_streamed
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.program import StateRole, StateSpec
from fastcar_compile.runtime.backends.cpu import CpuBackend, adopt
from fastcar_compile.runtime.session import Session
from fastcar_compile.runtime.state import StateArena

STEPS = 2000
CASE = Case()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("steps")
    return folder, export(CASE, folder)


def opened(built: tuple[Path, dict[str, Any]], threads: int = 2) -> CpuBackend:
    source = program(CASE)
    return CpuBackend(*built, source.params, source.state, source.config, threads)


def anonymous_kib() -> int:
    """Memory of this process that is not a view of a file."""
    lines = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def test_steps_allocate_nothing(built: tuple[Path, dict[str, Any]]) -> None:
    """2000 steps, a copied state of this decoder would be 0.1 MB each; what one step makes is gone at the next."""
    session = Session(opened(built), program(CASE).config, [0.0] * LAYERS)
    token = torch.tensor([3, 5])

    def steps(count: int) -> None:
        for i in range(count):
            if i % (LENGTH - 1) == 0:
                session.reset()
            session.step(token)

    steps(200)
    gc.collect()
    resident = anonymous_kib()
    tracemalloc.start()
    steps(200)
    traced = tracemalloc.get_traced_memory()[0]
    steps(STEPS)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now - traced < 4096
    assert peak - traced < 64 * 1024
    assert anonymous_kib() - resident < 1024


def test_state_and_weights_stay_where_they_are(built: tuple[Path, dict[str, Any]]) -> None:
    backend, source = opened(built), program(CASE)
    state = {name: tensor.data_ptr() for name, tensor in backend._state.tensors.items()}
    decode = backend._decode
    given = [np.from_dlpack(a).ctypes.data for a in decode.arguments]
    weights = {t.data_ptr() for t in source.params.values() if t.data_ptr() % 64 == 0 and t.numel() > 1}
    assert len(weights & set(given)) == len(weights) > 10
    assert set(state.values()) <= set(given)
    places = [
        backend.decode(token, i % LENGTH, i % LENGTH, np.zeros(LAYERS, np.float32)).logits.ctypes.data
        for i, token in enumerate(tokens(CASE, STEPS))
    ]
    results = decode._run(*decode.arguments)
    for name, address in state.items():
        assert np.from_dlpack(results[decode._places[name]]).ctypes.data == address, name
    assert {name: t.data_ptr() for name, t in backend._state.tensors.items()} == state
    assert [np.from_dlpack(a).ctypes.data for a in decode.arguments] == given
    half = STEPS // 2  # the pool hands out its blocks in turn
    assert set(places[half:]) <= set(places[:half]), "the VM's pool grows"
    assert any(t.abs().sum() > 0 for t in backend._state.tensors.values())


def test_results_stay_valid_while_they_are_held(built: tuple[Path, dict[str, Any]]) -> None:
    backend, limits = opened(built), np.full(LAYERS, np.inf, np.float32)
    kept, copies = [], []
    for i, token in enumerate(tokens(CASE, FRAME)):
        kept.append(backend.decode(token, i, i, limits))
        copies.append((kept[-1].logits.copy(), kept[-1].decisions.copy(), kept[-1].scores.copy()))
    for result, copied in zip(kept, copies, strict=True):
        for value, expected in zip((result.logits, result.decisions, result.scores), copied, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_sessions_with_different_threads_take_turns(built: tuple[Path, dict[str, Any]]) -> None:
    active = tvm.get_global_func("runtime.NumThreads")
    one, two = opened(built, 1), opened(built, 2)
    limits = np.zeros(LAYERS, np.float32)
    for i, token in enumerate(tokens(CASE, 2 * FRAME)):
        first = one.decode(token, i, i, limits)
        assert active() == 1
        second = two.decode(token, i, i, limits)
        assert active() == 2
        np.testing.assert_array_equal(first.logits, second.logits)
        np.testing.assert_array_equal(first.decisions, second.decisions)


def test_a_second_session_takes_no_memory_for_weights(tmp_path: Path) -> None:
    """32 MiB of weights in a file: two backends' arguments are views of it, and reading them makes no copy."""
    size = 32 << 20
    made = LazyTensors({"w": (size, lambda: torch.ones(size // 2, dtype=torch.bfloat16).view(torch.uint8))})
    write_streamed(tmp_path, "weights.safetensors", ["w"], made)
    gc.collect()
    before = anonymous_kib()
    views = [adopt(load_tensors(tmp_path / "weights.safetensors")["w"]) for _ in range(2)]
    total = sum(int(torch.from_dlpack(v).view(torch.int16)[::2048].sum()) for v in views)
    assert total == 2 * (size // 2 // 2048) * 0x3F80
    assert anonymous_kib() - before < 4096


def test_an_arena_is_zero_aligned_lazy_and_zero_again() -> None:
    specs = [
        StateSpec("a", (3, 5), torch.float32, StateRole.KEY_CACHE, 0),
        StateSpec("b", (7, 2), torch.int32, StateRole.CHAIN_COUNT, 0),
        StateSpec("big", (64 << 20,), torch.uint8, StateRole.VALUE_CACHE, 1),
    ]
    before = anonymous_kib()
    arena = StateArena(specs)
    assert [(t.dtype, tuple(t.shape)) for t in arena.tensors.values()] == [(s.dtype, s.shape) for s in specs]
    assert all(t.data_ptr() % 64 == 0 for t in arena.tensors.values())
    assert anonymous_kib() - before < 4096
    addresses = [t.data_ptr() for t in arena.tensors.values()]
    for tensor in arena.tensors.values():
        tensor.fill_(1)
    assert anonymous_kib() - before > 60 * 1024
    arena.clear()
    assert anonymous_kib() - before < 4096
    assert all(int(t.sum()) == 0 for t in arena.tensors.values())
    assert [t.data_ptr() for t in arena.tensors.values()] == addresses
    arena.tensors["b"].fill_(5)
    with arena.kept([StateRole.CHAIN_COUNT], slot=3):
        arena.tensors["a"].fill_(2)
        arena.tensors["b"].fill_(6)
    assert arena.tensors["a"].unique().tolist() == [2]
    assert arena.tensors["b"].tolist() == [[5, 5] if slot == 3 else [6, 6] for slot in range(7)]


def test_the_default_is_every_usable_core(built: tuple[Path, dict[str, Any]]) -> None:
    cores = len(os.sched_getaffinity(0))
    source = program(CASE)
    assert CpuBackend(*built, source.params, source.state, source.config, None)._threads == cores
    assert cpu_backend(CASE, *built)._threads == 2


def test_arguments_are_checked_when_a_session_opens(built: tuple[Path, dict[str, Any]]) -> None:
    """And not in every step; the state here has one position too few."""
    source = program(CASE)
    state = [
        replace(s, shape=(*s.shape[:2], s.shape[2] - 1, s.shape[3])) if len(s.shape) == 4 else s for s in source.state
    ]
    with pytest.raises(BackendError, match=r"the library does not take these arguments: .*ErrorContext"):
        CpuBackend(*built, source.params, state, source.config, 2)
