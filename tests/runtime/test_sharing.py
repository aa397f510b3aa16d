"""One session, one thread, one process: what the others are told."""

import copy
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest
from lowering.programs import LAYERS, Case, program
from numpy.typing import NDArray

from fastcar_compile.errors import InputError
from fastcar_compile.runtime import guard
from fastcar_compile.runtime.backends import Stepper, StepResult
from fastcar_compile.runtime.guard import thread_count
from fastcar_compile.runtime.session import Session

CASE = Case()
ROWS = 2
SECOND = "used by a second thread"


class SlowStepper(Stepper):
    """Waits in every forward until `go` is set; the logits are the sum of the tokens so far."""

    prefill_chunk = 1

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.seen = 0

    def reset(self) -> None:
        self.seen = 0

    def prefill(self, inputs: NDArray[Any], position: int) -> NDArray[Any]:
        return self.decode(inputs, position, 0, np.zeros(LAYERS, np.float32)).logits

    def decode(self, inputs: NDArray[Any], position: Any, step: Any, thresholds: NDArray[Any]) -> StepResult:
        self.entered.set()
        assert self.go.wait(30)
        self.seen += int(inputs[0, 0])
        logits = np.zeros((ROWS, 1, 50), np.float32)
        logits[:, :, self.seen % 50] = 1
        return StepResult.of({"logits": logits}, LAYERS)


def token(value: int = 1) -> NDArray[np.int64]:
    return np.full(ROWS, value)


@pytest.fixture
def stepper() -> SlowStepper:
    return SlowStepper()


def opened(stepper: SlowStepper) -> Session:
    return Session(stepper, program(CASE).config, [None] * LAYERS)


@pytest.fixture
def session(stepper: SlowStepper) -> Session:
    return opened(stepper)


def elsewhere(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(30)


def test_a_second_thread_is_refused_between_the_steps(session: Session, stepper: SlowStepper) -> None:
    session.step(token())
    for call in (lambda: session.step(token()), lambda: session.prefill(token()[:, None])):
        with pytest.raises(InputError, match=SECOND) as error:
            elsewhere(call)
        assert "one session per thread" in error.value.hint
    session.step(token())
    assert (session.position, stepper.seen) == (2, 2)


CALLS: dict[str, Callable[[Session], object]] = {
    "step": lambda session: session.step(token()),
    "prefill": lambda session: session.prefill(token()[:, None]),
    "reset": lambda session: session.reset(),
    "generate": lambda session: session.generate(token()[:, None], 2),
    "close": lambda session: session.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused_during_a_step(session: Session, stepper: SlowStepper, name: str) -> None:
    stepper.go.clear()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(session.step, token())
        assert stepper.entered.wait(30)
        with pytest.raises(InputError, match=f"{SECOND} while a call is running"):
            CALLS[name](session)
        stepper.go.set()
        running.result(30)
    assert (session.position, stepper.seen) == (1, 1)


def test_of_many_threads_one_decodes_and_every_other_call_raises(session: Session, stepper: SlowStepper) -> None:
    """The calls that return have exactly the logits of a session of one thread."""
    start = threading.Barrier(4, timeout=30)

    def decode() -> list[int]:
        found = []
        start.wait()
        for _ in range(100):
            try:
                found.append(int(session.step(token())[0].argmax()))
            except InputError:
                time.sleep(0)
        return found

    with ThreadPoolExecutor(4) as pool:
        results = [r.result(30) for r in [pool.submit(decode) for _ in range(4)]]
    steps = session.position
    assert sorted(map(len, results)) == [0, 0, 0, steps]
    assert max(results, key=len) == [i % 50 for i in range(1, steps + 1)]


def test_reset_and_generate_take_a_session_over(session: Session) -> None:
    session.step(token())
    elsewhere(session.reset)
    with pytest.raises(InputError, match=SECOND):
        session.step(token())
    assert session.position == 0
    found = session.generate(token()[:, None], 3)
    session.step(token())
    with pytest.raises(InputError, match=SECOND):
        elsewhere(lambda: session.step(token()))
    np.testing.assert_array_equal(elsewhere(lambda: session.generate(token()[:, None], 3)), found)


def test_a_session_opened_in_one_thread_is_used_in_another(session: Session) -> None:
    elsewhere(lambda: session.prefill(token()[:, None]))
    with pytest.raises(InputError, match=SECOND):
        session.step(token())


def test_callbacks_may_read_and_set_thresholds_but_not_decode(session: Session) -> None:
    positions: list[int] = []
    prompt = token()[:, None]
    expected = session.generate(prompt, 4)

    def watch(_token: Any) -> None:
        positions.append(session.position)
        session.set_threshold(None)

    np.testing.assert_array_equal(session.generate(prompt, 4, on_token=watch), expected)
    assert positions == [1, 2, 3, 4]
    for call in (
        lambda _token: session.step(token()),
        lambda _token: session.reset(),
        lambda _token: session.generate(prompt, 2),
        lambda _token: session.close(),
    ):
        with pytest.raises(InputError, match="called from within its own call"):
            session.generate(prompt, 4, on_token=call)
    np.testing.assert_array_equal(session.generate(prompt, 4), expected)


def test_a_session_of_a_callback_decodes(session: Session) -> None:
    other = opened(SlowStepper())
    seen: list[int] = []
    session.generate(token()[:, None], 4, on_token=lambda _: seen.append(int(other.step(token())[0].argmax())))
    assert seen == [1, 2, 3, 4]


def test_a_closed_session_says_so(session: Session) -> None:
    with session as same:
        assert same is session
        session.step(token())
    for call in (lambda: session.step(token()), session.reset, lambda: session.generate(token()[:, None], 2)):
        with pytest.raises(InputError, match="the session is closed"):
            call()
    session.close()


def interrupted(work: Callable[[], object], place: int) -> bool:
    """Run `work` with a Ctrl-C before the bytecode number `place` of the guard; return whether it has so many."""
    left = place

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != guard.__file__:
            return None
        frame.f_trace, frame.f_trace_opcodes = trace, True  # 3.13 asks for both here
        left -= event == "opcode"
        if event == "opcode" and left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # 3.12 asks for a frame that wants opcodes before `settrace`
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("name", ["step", "reset", "generate", "close"])
def test_an_interrupt_anywhere_leaves_the_session_to_its_thread(name: str) -> None:
    place = 0
    session = opened(SlowStepper())
    while interrupted(lambda session=session: CALLS[name](session), place):
        if name != "close":
            session.reset()
            session.step(token())
            elsewhere(session.reset)
        session.close()
        assert not hasattr(session, "_stepper"), "its memory is given back"
        session = opened(SlowStepper())
        place += 1
    assert place > 20


def test_a_failed_call_leaves_the_session_usable(session: Session) -> None:
    for bad in (np.zeros(ROWS, np.int32), np.full(ROWS, -1)):
        with pytest.raises(InputError):
            session.step(bad)
    session.step(token())
    assert session.position == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(session: Session, copied: Callable[[Session], object]) -> None:
    with pytest.raises(InputError, match="cannot be copied"):
        copied(session)


@pytest.mark.parametrize("count", [0, -1, 100_000, pytest.param(10**5000, id="huge"), True, 1.5, "2", [2], np.inf])
def test_a_number_of_threads_that_is_none(count: Any) -> None:
    with pytest.raises(InputError, match="expected is a whole number from 1 to"):
        thread_count(count)
