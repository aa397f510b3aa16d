"""How kernels are made: each one once, and where TVM's parser is quick.

The parser asks for all frames of the stack with their source lines, twice per kernel and once per call of an inlined
function. For a frame of evaluated text, Python looks through all loaded modules: this took longer than parsing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import Any, ParamSpec

from tvm.script.parser.core import utils
from tvm.script.parser.core.entry import scan_macro
from tvm.tirx import PrimFunc
from tvm.tirx.script.parser.entry import TIRMacro

P = ParamSpec("P")
KEPT = 256
"""Kernels kept of each kind, more than any model has."""


def kernel(make: Callable[P, PrimFunc]) -> Callable[P, PrimFunc]:
    """A decorator of functions that return a kernel and whose arguments tell it: equal arguments, the same kernel.

    It is made on a thread of its own, whose stack is short.
    """

    @lru_cache(KEPT, typed=True)
    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> PrimFunc:
        with ThreadPoolExecutor(1) as short:
            return short.submit(make, *args, **kwargs).result()

    return made  # pyright: ignore[reportReturnType]


def inlined(function: Callable[..., None]) -> Callable[..., None]:
    """A decorator like T.macro: a function of TVMScript whose statements stand in the kernel that calls it."""
    source, captured = scan_macro(function, utils.inspect_function_capture(function))
    macro = _Inlined(source, captured, function, True)

    def call(*args: Any, **kwargs: Any) -> None:
        macro(*args, **kwargs)

    return call


class _Inlined(TIRMacro):
    """Finds its caller's parser without reading source lines."""

    def _find_parser_def(self) -> Any:
        frame = inspect.currentframe()
        while frame is not None:
            if (parser := frame.f_globals.get(self.parser_object_name)) is not None:
                return parser
            frame = frame.f_back
        return super()._find_parser_def()
