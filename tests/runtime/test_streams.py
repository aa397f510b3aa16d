"""Readers of a batcher's tokens: whatever one of them does, the others get theirs."""

import asyncio
import contextlib
import copy
import gc
import multiprocessing
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import fresh_process
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.errors import InputError
from fastcar_compile.runtime import batcher as module
from fastcar_compile.runtime.backends.base import Stepper, StepResult, opened
from fastcar_compile.runtime.streams import TokenStream

VOCABULARY, PLACES = 17, 3
PROMPT = np.array([1, 2, 3])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    replay = fc.ReplayConfig(threshold=0.05, max_chain=2, refresh_every=3)
    options: dict[str, Any] = {"tokens_per_frame": 6, "max_seq_len": 64, "prefill_chunk": 4, "replay": replay}
    return fc.compile(
        llama(num_hidden_layers=1), "cpu", output=tmp_path_factory.mktemp("one") / "a", batch_size=1, rows=1, **options
    )


class Counting(Stepper):
    """Decodes the id behind each row's id. `gate` holds a decode step up; `during` runs in it."""

    row_thresholds = False

    def __init__(self) -> None:
        self.gate, self.during = threading.Event(), list[Callable[[np.ndarray], object]]()
        self.gate.set()

    def reset(self) -> None: ...

    def prefill(self, inputs: Any, position: int) -> Any: ...

    def decode(self, inputs: Any, position: Any, step: Any, thresholds: Any) -> StepResult:
        self.gate.wait()
        logits = np.where(np.arange(VOCABULARY) == (inputs + 1) % VOCABULARY, np.float32(1), np.float32(0))[:, None]
        for run in self.during:
            run(logits)
        shape = (len(thresholds), len(inputs))
        return StepResult(logits, np.zeros(shape, bool), np.zeros(shape, np.float32))

    def states(self) -> Any:
        return ()

    def write(self, changes: Any) -> None: ...


def after(token: int, count: int) -> list[int]:
    return [(token + 1 + i) % VOCABULARY for i in range(count)]


@pytest.fixture
def made(single: fc.Artifact, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[fc.Batcher, Counting]]]:
    """Batchers of three places that count."""
    three, manifest, batchers = (
        copy.copy(single),
        single.manifest,
        weakref.WeakKeyDictionary[fc.Batcher, threading.Event](),
    )
    config = replace(manifest.decoder.config, batch_size=PLACES)
    three.manifest = manifest.model_copy(update={"decoder": manifest.decoder.model_copy(update={"config": config})})

    def make(**options: Any) -> tuple[fc.Batcher, Counting]:
        stepper = Counting()
        with monkeypatch.context() as patch:
            patch.setattr(module, "opened", lambda *_: stepper)
            batcher = fc.Batcher(three, **options)
        batchers[batcher] = stepper.gate
        return batcher, stepper

    yield make
    for batcher, gate in list(batchers.items()):
        gate.set()
        batcher.close()


def sampler(choose: Callable[[np.ndarray], Any]) -> fc.Sampling:
    class Own(fc.Sampling):
        def start(self, prompt: Any) -> Any:
            return choose

    return Own()


def raising(error: BaseException) -> fc.Sampling:
    def choose(_logits: np.ndarray) -> Any:
        raise error

    return sampler(choose)


async def read(stream: TokenStream) -> list[int]:
    return [token async for token in stream]


def in_threads(*runs: Callable[[], object]) -> None:
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"


@pytest.mark.parametrize("backend", ["cpu", "onnxruntime"])
def test_one_place_of_one_row(single: fc.Artifact, backend: str) -> None:
    with single.session(backend, threads=1) as session, fc.Batcher(single, backend, threads=1) as batcher:
        for length, count in ((1, 12), (9, 20)):
            stream = batcher.submit(np.arange(length), count, fc.Sampling(seed=length))
            expected = session.generate(np.arange(length)[None], count, fc.Sampling(seed=length))
            assert stream.result() == expected[0].tolist()
            assert stream.replay_ratio == pytest.approx(session.stats.replay_ratio)


def test_event_loops_that_end_or_refuse_calls(made: Any) -> None:
    """Loops in threads of their own: two that are closed while their sequences wait and decode, and a good one."""
    batcher, stepper = made(waiting=8)

    class Deaf(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("the decoding thread called an event loop")

    def ends(number: int) -> None:
        loop, stream = Deaf(), batcher.submit(PROMPT, 40)
        reading = loop.create_task(read(stream))
        loop.run_until_complete(asyncio.sleep(0.002 * number))
        reading._log_destroy_pending = False  # type: ignore[attr-defined]  # it is the point
        loop.close()
        closed.append((stream, reading))

    closed, found, stepper.during = list[Any](), list[list[int]](), [lambda _: time.sleep(0.0005)]
    good = [partial(lambda: found.append(asyncio.run(read(batcher.submit(PROMPT, 40))))) for _ in range(2)]
    in_threads(*good, *(partial(ends, number) for number in range(6)))
    assert found == [after(3, 40)] * 2
    assert [stream.result(20)[-1] for stream, _ in closed] == [after(3, 40)[-1]] * 6
    assert batcher.submit(PROMPT, 3).result(20) == after(3, 3)


def test_waits_that_time_out_leave_nothing(made: Any) -> None:
    batcher, stepper = made()
    stepper.gate.clear()
    stream, before = batcher.submit(PROMPT, 20), len(os.listdir("/proc/self/fd"))

    async def late(times: int) -> list[int]:
        for _ in range(times):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 1e-6)
        assert not stream._tokens._at_next
        stepper.gate.set()
        return await read(stream)

    for _ in range(300):
        with pytest.raises(TimeoutError, match="has not ended after 1e-06 seconds, and goes on"):
            stream.result(1e-6)
    assert not stream._tokens._at_end
    assert asyncio.run(late(300)) == after(3, 20)
    for _ in range(30):
        assert asyncio.run(read(batcher.submit(PROMPT, 2))) == after(3, 2)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for wrong in (np.nan, "1", True):
        with pytest.raises(InputError, match="the timeout is"):
            stream.result(wrong)


def test_streams_that_are_left_free_their_places(made: Any) -> None:
    """Nobody may wait here, so a place that is not free refuses the next sequence."""
    batcher, stepper = made(waiting=0, unread=1)

    async def leave() -> None:
        tasks = list[Any]()
        for _ in range(20):
            stepper.gate.clear()
            tasks += (own := [asyncio.create_task(read(batcher.submit(PROMPT, 50))) for _ in range(PLACES)])
            await asyncio.sleep(0.0005)
            for task in own:  # they are kept, and with them their tracebacks
                task.cancel()
            tasks += await asyncio.gather(*own, return_exceptions=True)
            stepper.gate.set()
            for _ in range(PLACES):
                async for _token in batcher.submit(PROMPT, 50):
                    break
                with contextlib.suppress(ZeroDivisionError):
                    async for token in batcher.submit(PROMPT, 50):
                        tasks.append(token / 0)
                assert await anext(batcher.submit(PROMPT, 50)) == 4
                named = batcher.submit(PROMPT, 50)
                async for _token in named:
                    break
                with pytest.raises(InputError, match="the `async for` over the stream was left"):
                    await read(named)
                async with contextlib.aclosing(batcher.submit(PROMPT, 50)) as stream:
                    async for _token in stream:
                        break
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                batcher.submit(PROMPT, 50)
            full = [batcher.submit(PROMPT, 50) for _ in range(PLACES)]
            for stream in full:
                stream.cancel()
                assert stream.result() == after(3, 50)[: len(stream._tokens.ids)]

    asyncio.run(leave())
    assert not batcher._decoding.going


def test_the_garbage_collector_ends_streams_on_any_thread(made: Any) -> None:
    batcher, stepper = made(waiting=2 * PLACES)
    stepper.during = [lambda _: gc.collect(0)]
    cycle = list[Any]()
    for _ in range(100):
        cycle = list[Any]()
        cycle.append(cycle)
        with contextlib.suppress(InputError):  # of a cycle that is not collected yet
            cycle.append(batcher.submit(PROMPT, 60))
    del cycle
    end = time.monotonic() + 20
    while batcher._decoding.going and time.monotonic() < end:
        gc.collect()  # it does nothing while the decoding thread collects
    assert not batcher._decoding.going
    assert batcher.submit(PROMPT, 3).result(20) == after(3, 3)


def test_limits_count_sequences_that_wait(made: Any) -> None:
    batcher, stepper = made(waiting=8)
    stepper.gate.clear()
    streams = [batcher.submit(PROMPT, 5) for _ in range(PLACES + 8)]
    for i in range(6):
        with pytest.raises(InputError, match="every place is taken, and 8 sequences wait already"):
            batcher.submit(PROMPT, 5)
        streams.pop(i).cancel()
        streams.append(batcher.submit(PROMPT, 5))
    stepper.gate.set()
    assert [stream.result(20) for stream in streams] == [after(3, 5)] * (PLACES + 8)
    none, stepper = made(waiting=0)
    stepper.gate.clear()
    streams = [none.submit(PROMPT, 5) for _ in range(PLACES)]
    with pytest.raises(InputError, match="every place is taken, and 0 sequences wait already"):
        none.submit(PROMPT, 5)
    stepper.gate.set()
    for _ in range(50):  # a result means that the place is free
        assert streams.pop().result(20) == after(3, 5)
        streams.append(none.submit(PROMPT, 5))


def refused(call: Callable[[], object], errors: list[InputError]) -> None:
    try:
        while True:
            call()
    except InputError as error:
        errors.append(error)


def test_close_ends_every_reader_with_an_error_of_its_own(made: Any) -> None:
    for unread in (1, 2, 50) * 3:
        batcher, stepper = made(waiting=40, unread=unread)
        errors, steps, streams = list[InputError](), list[int](), [batcher.submit(PROMPT, 60) for _ in range(12)]

        def slow(
            logits: np.ndarray, steps: list[int] = steps, shared: Any = batcher._decoding, unread: int = unread
        ) -> None:
            steps.append(len(logits))
            while len(steps) > 10 + unread and shared.error is None:
                time.sleep(0.0005)

        stepper.during.append(slow)
        readers = [partial(refused, stream.result, errors) for stream in streams[:4] for _ in range(2)]
        loops = [partial(refused, partial(lambda one: asyncio.run(read(one)), one), errors) for one in streams[4:8]]
        submits = partial(refused, partial(lambda own: own.submit(PROMPT, 1).result(), batcher), errors)
        in_threads(*readers, *loops, submits, *[partial(lambda own: (time.sleep(0.005), own.close()), batcher)] * 3)
        assert len({id(error) for error in errors}) == len(errors) == 13
        assert all(error.what in ("the batcher was closed", "the batcher is closed") for error in errors)
        lengths = list[int]()
        for _ in range(3):
            with pytest.raises(InputError, match="the batcher was closed") as caught:
                streams[9].result()
            lengths.append(len(caught.traceback))
        assert len({*lengths}) == 1
        batcher.close()


@pytest.mark.parametrize("way", ["close", "abandon"])
def test_an_end_while_the_thread_looks_for_news_is_seen(made: Any, way: str) -> None:
    """The end comes just before the thread drops its news, among which is the news of this end."""
    batcher, _ = made()
    shared = batcher._decoding

    class News(queue.SimpleQueue[None]):
        ends = True

        def empty(self) -> bool:
            if self.ends:
                self.ends = False
                shared.end(InputError("the batcher was closed")) if way == "close" else shared.abandon()
            return super().empty()

    old, shared.news = shared.news, News()
    old.put(None)
    shared.thread.join(20)
    assert not shared.thread.is_alive()


def test_what_has_ended_keeps_no_memory_and_no_thread(made: Any) -> None:
    def ended(thread: threading.Thread, stepper: Callable[[], Counting | None]) -> None:
        thread.join(20)
        assert not thread.is_alive()
        gc.collect()
        assert stepper() is None

    def failed(stream: TokenStream, error: type[Exception]) -> tuple[TokenStream, Exception]:
        with pytest.raises(error) as caught:
            stream.result(20)
        return stream, caught.value

    def device_is_gone(_logits: np.ndarray) -> None:
        raise OSError("the device is gone")

    batcher, stepper = made()
    stepper = weakref.ref(stepper)
    kept: list[Any] = [failed(batcher.submit(PROMPT, 9, raising(RuntimeError("no"))), RuntimeError)]
    batcher.close()
    ended(batcher._decoding.thread, stepper)
    batcher, stepper = made()
    stepper.during.append(device_is_gone)
    stepper = weakref.ref(stepper)
    kept.append(failed(batcher.submit(PROMPT, 9), OSError))
    with pytest.raises(InputError, match="the batcher is closed") as caught:
        batcher.submit(PROMPT, 9)
    assert isinstance(caught.value.__cause__, OSError)
    ended(batcher._decoding.thread, stepper)
    batcher, stepper = made()  # nobody closes it: its last stream is decoded, then it ends
    stream, thread, stepper = batcher.submit(PROMPT, 40), batcher._decoding.thread, weakref.ref(stepper)
    del batcher
    assert stream.result(20) == after(3, 40)
    ended(thread, stepper)
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (np.array([10**9]), "token 1000000000 is outside the vocabulary of 17"),
        (np.array([2**64 - 1], np.uint64), "outside the vocabulary"),
        (np.array([4.0]), r"the sampler returned float64 \[1\]"),
        (np.array([4, 4]), r"returned int64 \[2\]"),
        (None, "returned object"),
    ],
)
def test_ids_that_a_sampler_must_not_choose(made: Any, chosen: Any, text: str) -> None:
    batcher, _ = made()
    good, wrong = batcher.submit(PROMPT, 30), batcher.submit(PROMPT, 30, sampler(lambda _: chosen))
    with pytest.raises(InputError, match=text):
        wrong.result(20)
    assert good.result(20) == after(3, 30)


def test_samplers_that_raise_or_wait_end_alone(made: Any) -> None:
    """No error of a sampler ends the reader's loop or task, or looks like the end of the tokens."""
    batcher, _ = made()
    good = batcher.submit(PROMPT, 60)
    named: list[BaseException] = [SystemExit(3), KeyboardInterrupt(), StopAsyncIteration(), asyncio.CancelledError()]
    for error in (*named, StopIteration(), GeneratorExit()):
        with pytest.raises(InputError, match=f"the sequence ended with {type(error).__name__}"):
            asyncio.run(read(batcher.submit(PROMPT, 9, raising(error))))
    for error in (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), InputError("mine", hint="none"), KeyError(1)):
        found = list[BaseException]()
        stream = batcher.submit(PROMPT, 9, raising(error))
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                stream.result(20)
            found.append(caught.value)
        assert found[0] is not found[1]
        assert [str(one) for one in found] == [str(error)] * 2
    waits: list[Callable[[np.ndarray], object]] = [
        lambda _: batcher.close(),
        lambda _: batcher.submit(PROMPT, 3).result(),
        lambda _: asyncio.run(read(batcher.submit(PROMPT, 3))),
    ]
    for choose in waits:
        with pytest.raises(InputError, match="called by a sampler, and would wait for the thread that runs it"):
            batcher.submit(PROMPT, 9, sampler(choose)).result(20)
    again = sampler(lambda logits: batcher.submit(PROMPT, 1) and logits.argmax(-1))
    assert batcher.submit(PROMPT, 9, again).result(20) == after(3, 9)
    assert good.result(20) == after(3, 60)


def test_a_process_ends_although_a_sampler_does_not(single: fc.Artifact) -> None:
    text = f"""
import sys, time
import numpy as np
import fastcar_compile as fc
from fastcar_compile.runtime import batcher
class Slow(fc.Sampling):
    def start(self, prompt):
        return lambda logits: time.sleep(1e6)
batcher.EXIT_SECONDS = 0.2
made = fc.Batcher(fc.load({str(single.path)!r}), threads=1)
stream = made.submit(np.array([1]), 9, Slow())
time.sleep(0.5)
sys.exit(0)
"""
    fresh_process("-c", text)


def test_samplers_may_keep_logits(made: Any) -> None:
    batcher, _ = made()
    kept = list[np.ndarray]()
    tokens = batcher.submit(PROMPT, 9, sampler(lambda logits: kept.append(logits) or logits.argmax(-1))).result(20)
    assert [int(logits.argmax()) for logits in kept] == tokens == after(3, 9)


def test_logits_that_are_not_finite(made: Any) -> None:
    """A model that masks with -inf is decoded. NaN ends its own sequence, and names the position."""
    batcher, stepper = made()

    def masked(logits: np.ndarray) -> None:
        logits[logits == 0] = -np.inf
        logits[(logits == 1).any(-1) & (logits.argmax(-1) == 8)] = np.nan

    stepper.during.append(masked)
    nan, good = batcher.submit(PROMPT, 12), batcher.submit(np.array([9]), 12)
    assert good.result(20) == after(9, 12)
    with pytest.raises(InputError, match="the logits at position 6 are NaN"):
        nan.result(20)
    assert asyncio.run(anext_of(batcher.submit(np.array([9]), 2, fc.Sampling(seed=1)))) == 10


async def anext_of(stream: TokenStream) -> int:
    return await anext(stream)


def test_nan_does_not_stay_in_its_place(single: fc.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime multiplies what a mask hides by zero, which NaN survives."""
    stepper = opened(single, "onnxruntime", 1)
    decode = stepper.decode
    monkeypatch.setattr(module, "opened", lambda *_: stepper)

    def poisoned(inputs: Any, *args: Any, **options: Any) -> StepResult:
        if inputs.max() == 16:
            names = [state.name for state in stepper.states() if "cache" in state.role and "mlp" not in state.role]
            stepper.write((name, slice(None), np.full_like(stepper.read(name, slice(None)), np.nan)) for name in names)
        return decode(inputs, *args, **options)

    with fc.Batcher(single, "onnxruntime", threads=1) as batcher:
        monkeypatch.setattr(stepper, "decode", poisoned)
        expected = batcher.submit(PROMPT, 6).result(20)
        with pytest.raises(InputError, match="are NaN"):
            batcher.submit(np.array([1, 16]), 6).result(20)
        assert batcher.submit(PROMPT, 6).result(20) == expected


def test_a_forked_child_is_refused_by_name(made: Any) -> None:
    batcher, stepper = made()
    stepper.gate.clear()
    stream, queue = batcher.submit(PROMPT, 9), multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        for call in (partial(batcher.submit, PROMPT, 1), stream.result, lambda: asyncio.run(read(stream))):
            try:
                queue.put(repr(call()))
            except InputError as error:
                queue.put(error.what)
        batcher.close()
        queue.put("closed")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert [queue.get() for _ in range(4)] == ["the batcher was made before a fork, in the parent process"] * 3 + [
        "closed"
    ]
    stepper.gate.set()
    assert stream.result(20) == after(3, 9)


def test_prompts_are_copied_and_checked_before(made: Any) -> None:
    batcher, stepper = made()
    stepper.gate.clear()
    prompt = PROMPT.copy()
    stream = batcher.submit(prompt, 5)
    prompt[:] = 10**9
    stepper.gate.set()
    assert stream.result(20) == after(3, 5)
    endless = np.broadcast_to(np.zeros(1, np.int64), 10**12)  # a copy of it would be 8 TB
    for wrong in (endless, PROMPT[None], PROMPT + 99, [], "abc", None, object(), [1.5], [[1], [1, 2]]):
        with pytest.raises(InputError):
            batcher.submit(wrong, 1)
    for count in (0, -1, 10**30, 1.5, True, None, "3"):
        with pytest.raises(InputError, match="num_tokens is"):
            batcher.submit(PROMPT, count)
