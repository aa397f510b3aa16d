"""A clock of what a session asks of its stepper."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import numpy as np

from fastcar_compile.runtime.backends.base import Stepper


class Clock:
    """Times the forwards of a stepper: the decode steps, within `counted`, and what reads tokens as a prompt.

    Attributes:
        read, steps: seconds of each. computing: which rows of each decode step computed, bool [rows, L].
    """

    def __init__(self, stepper: Stepper, counted: AbstractContextManager[object] | None = None) -> None:
        self.read, self.steps, self._reading, self._counted = list[float](), list[float](), False, counted
        self.computing = list[np.ndarray]()
        for name in ("prefill", "decode"):  # of the class: the object may have those of another clock
            forward = MethodType(getattr(type(stepper), name), stepper)
            setattr(stepper, name, partial(getattr(self, f"_{name}"), forward))

    def _prefill(self, forward: Callable[..., Any], *given: Any) -> Any:
        self._reading, begin = True, time.perf_counter()
        result = forward(*given)
        self._reading = False
        self.read.append(time.perf_counter() - begin)
        return result

    def _decode(self, forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
        if self._reading:  # a single token is read by a decode step
            return forward(*given, **options)
        with self._counted or nullcontext():
            begin = time.perf_counter()
            result = forward(*given, **options)
            self.steps.append(time.perf_counter() - begin)
        self.computing.append(~result.decisions.T & (np.reshape(options["position"], (-1, 1)) >= 0))
        return result
