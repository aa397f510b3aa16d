"""One session, one thread, one process: what the others are told."""

import copy
import pickle
import sys
import threading
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


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(session: Session, copied: Callable[[Session], object]) -> None:
    with pytest.raises(InputError, match="cannot be copied"):
        copied(session)
