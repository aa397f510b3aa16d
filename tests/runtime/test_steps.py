"""What a step may not do: allocate, move state or weights, or depend on the number of threads."""

import gc
import os
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from lowering.programs import FRAME, LAYERS, LENGTH, Case, cpu_backend, export, numpy_params, program, tokens
from tensor_maps import load_tensors

from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.artifact.sections import State
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.tensor_files import save_tensors
from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime.backends.cpu import CpuStepper, Library
from fastcar_compile.runtime.session import Session
from fastcar_compile.runtime.state import StateArena
from fastcar_compile.runtime.tvm_runtime import adopt, as_array, global_function

STEPS = 2000
CASE = Case()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return export(CASE, tmp_path_factory.mktemp("steps"))


def opened(built: Library, threads: int | None = 2) -> CpuStepper:
    source = program(CASE)
    return CpuStepper(built, decoder_section(source), numpy_params(source), threads)


def anonymous_kib() -> int:
    """Memory of this process that is not a view of a file."""
    lines = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def test_steps_allocate_nothing(built: Library) -> None:
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
    assert anonymous_kib() - resident < 16 * 1024  # 200 MB if a step kept its state; the heap of a long process moves


def test_state_and_weights_stay_where_they_are(built: Library) -> None:
    backend, source = opened(built), program(CASE)
    state = {name: array.ctypes.data for name, array in backend._state.arrays.items()}
    decode = backend._decode
    given = [as_array(a).ctypes.data for a in decode.arguments]
    weights = {t.data_ptr() for t in source.params.values() if t.data_ptr() % 64 == 0 and t.numel() > 1}
    assert len(weights & set(given)) == len(weights) > 10
    assert set(state.values()) <= set(given)
    places = [
        backend.decode(token, i % LENGTH, i % LENGTH, np.zeros(LAYERS, np.float32)).logits.ctypes.data
        for i, token in enumerate(tokens(CASE, STEPS))
    ]
    results = decode._run(*decode.arguments)
    for name, address in state.items():
        assert as_array(results[decode._places[name]]).ctypes.data == address, name
    assert {name: a.ctypes.data for name, a in backend._state.arrays.items()} == state
    assert [as_array(a).ctypes.data for a in decode.arguments] == given
    half = STEPS // 2  # the pool hands out its blocks in turn
    assert set(places[half:]) <= set(places[:half]), "the VM's pool grows"
    assert any(a.any() for a in backend._state.arrays.values())


def test_results_stay_valid_while_they_are_held(built: Library) -> None:
    backend, limits = opened(built), np.full(LAYERS, np.inf, np.float32)
    kept, copies = [], []
    for i, token in enumerate(tokens(CASE, FRAME)):
        kept.append(backend.decode(token, i, i, limits))
        copies.append((kept[-1].logits.copy(), kept[-1].decisions.copy(), kept[-1].scores.copy()))
    for result, copied in zip(kept, copies, strict=True):
        for value, expected in zip((result.logits, result.decisions, result.scores), copied, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_sessions_with_different_threads_take_turns(built: Library) -> None:
    active = global_function("runtime.NumThreads")
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
    save_tensors(tmp_path / "weights.safetensors", {"w": np.ones(size // 2, ml_dtypes.bfloat16)})
    gc.collect()
    before = anonymous_kib()
    views = [adopt(load_tensors(tmp_path / "weights.safetensors")["w"]) for _ in range(2)]
    total = sum(int(torch.from_dlpack(v).view(torch.int16)[::2048].sum()) for v in views)
    assert total == 2 * (size // 2 // 2048) * 0x3F80
    assert anonymous_kib() - before < 4096


def test_an_arena_is_zero_aligned_lazy_and_zero_again() -> None:
    specs = [
        State(name="a", shape=(3, 5), dtype="float32", role=StateRole.KEY_CACHE, layer=0),
        State(name="b", shape=(7, 2), dtype="int32", role=StateRole.CHAIN_COUNT, layer=0),
        State(name="big", shape=(64 << 20,), dtype="uint8", role=StateRole.VALUE_CACHE, layer=1),
    ]
    before = anonymous_kib()
    arena = StateArena(specs)
    assert [(a.dtype.name, a.shape) for a in arena.arrays.values()] == [(s.dtype, s.shape) for s in specs]
    assert all(a.ctypes.data % 64 == 0 for a in arena.arrays.values())
    assert anonymous_kib() - before < 4096
    addresses = [a.ctypes.data for a in arena.arrays.values()]
    for array in arena.arrays.values():
        array.fill(1)
    assert anonymous_kib() - before > 60 * 1024
    arena.clear()
    assert anonymous_kib() - before < 4096
    assert not any(a.any() for a in arena.arrays.values())
    assert [a.ctypes.data for a in arena.arrays.values()] == addresses


def test_the_default_is_every_usable_core(built: Library) -> None:
    cores = len(os.sched_getaffinity(0))
    assert opened(built, None)._threads == cores
    assert cpu_backend(CASE, built)._threads == 2


def test_arguments_are_checked_when_a_session_opens(built: Library) -> None:
    """And not in every step; the state here has one position too few."""
    section = decoder_section(program(CASE))
    state = tuple(
        s.model_copy(update={"shape": (*s.shape[:2], s.shape[2] - 1, s.shape[3])}) if len(s.shape) == 4 else s
        for s in section.state
    )
    with pytest.raises(BackendError, match=r"the library does not take these arguments: .*ErrorContext"):
        CpuStepper(built, section.model_copy(update={"state": state}), numpy_params(program(CASE)), 2)
