"""How kernels are made: each one once, by a parser that reads a source once.

TVM's own parser compiles a Python expression for each name, call and subscript, parses an inlined function anew for
each of its calls, notes where each expression stands, and asks for all frames of the stack with their source lines:
most of its time. Here an expression is walked once, and trees of sources are kept. What is built is the same but for
the places of expressions.
"""

import builtins
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, cached_property, lru_cache, wraps
from threading import RLock
from types import CodeType, SimpleNamespace
from typing import Any, ParamSpec, cast

import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.parser.core import diagnostics, doc, error, evaluator, utils
from tvm.script.parser.core.parser import Parser, ScriptMacro
from tvm.tirx import PrimFunc
from tvm.tirx.script.parser.entry import TIRMacro

from fastcar_compile.codegen.tvm.kernels import OPAQUE

P = ParamSpec("P")
KEPT = 256
"""Kernels kept of each kind, more than any model has."""

_NOWHERE = nullcontext()

_PARSING = RLock()
"""Held while a kernel is made: kernels share trees, in which the parser marks what it is at."""

_parser: ContextVar[Parser | None] = ContextVar("fastcar_kernel_parser", default=None)
"""The parser of the kernel that is being made."""


def kernel(make: Callable[P, PrimFunc]) -> Callable[P, PrimFunc]:
    """A decorator of functions that return a kernel and whose arguments tell it: equal arguments, the same kernel."""
    # `typed` keeps 1, 1.0 and True apart: lru_cache alone takes these for equal, and their literals differ in TIR.
    return cast("Callable[P, PrimFunc]", wraps(make)(lru_cache(KEPT, typed=True)(make)))


def prim_func(*, private: bool, s_tir: bool) -> Callable[[Callable[..., Any]], PrimFunc]:
    """T.prim_func for the functions in this package: a decorator that parses a function of TVMScript.

    It is written `@script.prim_func(private=True, s_tir=True)`: the parser reads the two from the source.
    """
    # currentframe() is this call, and f_back is the function that builds the kernel: its locals hold the shapes.
    caller = inspect.currentframe()
    around = caller.f_back.f_locals if caller is not None and caller.f_back is not None else {}

    def parse(function: Callable[..., Any]) -> PrimFunc:
        # Names of annotations, which are texts, are no closure: they are in the frame of the caller.
        return _parsed(function, {**around, **utils.inspect_function_capture(function)})

    setattr(parse, "dispatch_token", "tirx")  # noqa: B010  (how the parser knows the decorator)
    return parse


def _parsed(function: Callable[..., Any], names: dict[str, Any]) -> PrimFunc:
    source = _source(function.__code__, function.__code__.co_filename)
    parser = _Parser(source, {function.__name__: function.__annotations__})
    # The lock covers the whole parse, because the trees of inlined functions are shared with other kernels.
    with _PARSING, _current(parser), IRBuilder() as builder:
        try:
            parser.parse(extra_vars=names)
        except error.ParserError as failure:
            parser.report_error(failure.node, failure.args[0])
        made: Any = builder.get()
    # Ill-formed TIR fails here, at its kernel, and not in a later pass over the whole module.
    tvm.s_tir.analysis.verify_well_formed(tvm.IRModule.from_expr(made))
    made = made.with_attr("op_pattern", OPAQUE)
    made.__name__ = function.__name__
    return made


def without(kernel: PrimFunc, number: int) -> PrimFunc:
    """Return a kernel without an argument that nothing in it reads: the parser takes a fixed list of arguments."""
    params = [param for i, param in enumerate(kernel.params) if i != number]
    shorter: Any = PrimFunc(params, kernel.body, attrs=kernel.attrs)
    shorter.__name__ = cast(Any, kernel).__name__
    return shorter


def access(reads: Sequence[Any], writes: Sequence[Any]) -> None:
    """Declare that a block of TVMScript reads and writes these buffers, each as a whole."""
    for declare, buffers in ((T.reads, reads), (T.writes, writes)):
        declare(*(buffer[tuple(slice(0, size) for size in buffer.shape)] for buffer in buffers))


def temporaries(**parts: Any) -> Any:
    """Allocate the temporaries of a kernel, each given as (*shape, dtype); return them by name.

    What is no such tuple, such as an argument of the kernel, is a part of the result as it is.
    """
    made = SimpleNamespace()
    for name, part in parts.items():
        if isinstance(part, tuple) and isinstance(part[-1], str):
            part = T.alloc_buffer(part[:-1], part[-1])
            IRBuilder.name(name, part)
        setattr(made, name, part)
    return T.meta_var(made)


def buffers(count: int, size: int, dtype: str = "float32") -> tuple[Any, ...]:
    """Allocate `count` vectors: one buffer of 1024 bytes or more would not be on the stack."""
    return tuple(T.alloc_buffer((size,), dtype) for _ in range(count))


def each(macro: Callable[..., None], these: Sequence[Any], *arguments: Any) -> None:
    """Call the macro for every one of several buffers: (arguments ..., buffer, its number)."""
    for number, buffer in enumerate(these):
        macro(*arguments, buffer, number)


def inlined(function: Callable[..., None]) -> Callable[..., None]:
    """A decorator like T.macro: a function of TVMScript whose statements stand in the kernel that calls it."""
    # The source is read once. Its tree is made at the first call and serves all later ones.
    source = _source(function.__code__, function.__code__.co_filename)

    @cache
    def macro() -> _Inlined:
        # Made at the first call, when what stands below the function in its file is defined.
        # True is hygienic: a name in the body is that of its definition, not that of the kernel that calls it.
        return _Inlined(source, utils.inspect_function_capture(function), function, True)

    def call(*args: Any, **kwargs: Any) -> None:
        macro()(*args, **kwargs)

    return call


@contextmanager
def _current(parser: Parser) -> Generator[None]:
    # The token gives back the outer parser, where a kernel is made while another one is parsed.
    token = _parser.set(parser)
    try:
        yield
    finally:
        _parser.reset(token)


class _Source(diagnostics.Source):
    """A function's source, whose tree is made once."""

    @cached_property
    def _tree(self) -> doc.AST:
        return super().as_ast()

    def as_ast(self) -> doc.AST:
        """Return the tree."""
        return self._tree


@cache
def _source(code: CodeType, _file: str) -> _Source:
    """Return the source of a function of this package. Equal code of two files is not the same."""
    return _Source(cast(Any, code))


class _Inlined(TIRMacro):
    """Finds its caller's parser without reading source lines."""

    def _find_parser_def(self) -> Any:
        # A macro inside TVM's own T.prim_func has no parser in the variable, so the stack is searched as before.
        return _parser.get() or super()._find_parser_def()


class _Parser(Parser):
    """Evaluates expressions with `_Evaluator`. Nothing reads where an expression stood, so it is not noted."""

    def with_source_span(self, node: Any) -> Any:
        """Do without a source range for what is made inside; an error still names its statement."""
        del node
        return _NOWHERE

    def annotate_current_source_span(self, value: Any) -> Any:
        """Return the value as it is."""
        return value

    def eval_expr(self, node: Any, extra_vars: dict[str, Any] | None = None) -> Any:
        """Return the value of an expression."""
        values = {**self.var_table.get(), **(extra_vars or {}), ScriptMacro.parser_object_name: self}
        return _Evaluator(self, values).value(node)


class _Evaluator(evaluator.ExprEvaluator):
    """Walks an expression once. TVM's keeps each intermediate value under a name of its own, in a new node of the tree.
    What is rare, such as a comprehension, Python evaluates, as TVM has it.
    """

    def value(self, node: Any) -> Any:
        """Return the value of an expression."""
        try:
            return self._eval_expr(node)
        except Exception as failure:
            return self.parser.report_error(node, failure)  # raises, with the place of the expression

    def _visit(self, node: Any) -> Any:
        # TVM's methods for conditions and Boolean operators evaluate what this returns.
        return node

    def _eval_expr(self, v: Any) -> Any:
        match v:
            case doc.Name():
                return self.value_table[v.id] if v.id in self.value_table else getattr(builtins, v.id)
            case doc.Constant():
                return v.value
            case doc.Attribute():
                return getattr(self._eval_expr(v.value), v.attr)
            case doc.BinOp():
                return self._eval_bin_op(vars(v))
            case doc.Subscript():
                return self._eval_expr(v.value)[self._eval_expr(v.slice)]
            case doc.Call():
                return self._eval_expr(v.func)(*self._elements(v.args), **self._keywords(v.keywords))
            case doc.Tuple():
                return tuple(self._elements(v.elts))
            case doc.List():
                return self._elements(v.elts)
            case doc.Compare():
                return self._eval_compare(vars(v))
            case doc.UnaryOp():
                return self._eval_unary_op(vars(v))
            case doc.BoolOp():
                return self._eval_bool_op(v)
            case doc.IfExp():
                return self._eval_if_exp(v)
            case _:
                return super()._eval_expr(v)

    def _elements(self, nodes: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, doc.Starred):
                # `buffer[(*index, c)]`: the elements of the starred value stand in its place.
                found += self._eval_expr(node.value)
            else:
                found.append(self._eval_expr(node))
        return found

    def _keywords(self, nodes: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for node in nodes:
            value = self._eval_expr(node.value)
            found |= value if node.arg is None else {node.arg: value}
        return found
