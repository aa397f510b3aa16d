"""Buffers of a flat entry: those whose values are not needed at a time share a storage."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import tvm
from tvm import relax
from tvm.tirx import IntImm

from fastcar_compile.codegen.tvm.relax_api import Shape, Values, bindings_of, packed_name, replaced, shape_of, untyped

_STORAGE, _TENSOR = (tvm.ir.Op.get(f"relax.vm.alloc_{name}") for name in ("storage", "tensor"))
_VIEW = "vm.builtin.reshape"

Roots = frozenset[relax.Var]
"""Storages that a value may be in."""


def shared(statements: Sequence[relax.VarBinding], results: relax.Expr) -> list[relax.VarBinding]:
    """Return the statements with few storages in place of many, and their tensors made before them.

    A storage serves buffers whose values are not needed at a time. A tensor is made once for each storage, shape and
    type, however many layers write it, and a view of it is one more such tensor. A result keeps a storage of its own,
    because a caller may keep it beyond the next call.

    Args:
        statements: of a flat entry. results: what it returns.
    """
    lives = _Lives()
    lives.follow(statements)
    kept = lives.roots_of(results)
    writer = _BufferWriter(_storages({var: life for var, life in lives.found.items() if var not in kept}))
    rest = writer.rewritten(statements)
    return [*writer.made, *rest]


@dataclass
class _Life:
    """A storage of `size` bytes, what makes it, and the first and last statement that reads or writes it."""

    size: int
    call: relax.Call
    first: int
    last: int


@dataclass
class _Lives:
    """Follows the statements in order, those of both branches one after the other."""

    found: dict[relax.Var, _Life] = field(default_factory=dict[relax.Var, _Life])
    _roots: dict[relax.Var, Roots] = field(default_factory=dict[relax.Var, Roots])
    _now: int = 0

    def follow(self, statements: Sequence[relax.VarBinding]) -> None:
        for statement in statements:
            self._now += 1
            var, value = statement.var, statement.value
            if isinstance(value, relax.Call) and value.op == _STORAGE:
                self.found[var] = _Life(_size(value), value, self._now, self._now)
                self._roots[var] = frozenset({var})
                continue
            if isinstance(value, relax.If):
                self._use(value.cond)
                for branch in (value.true_branch, value.false_branch):
                    self.follow(_statements(branch))
            # Any operand of a call may be what the call returns, or what it returns is a view of.
            self._roots[var] = self._use(value)

    def roots_of(self, value: relax.Expr) -> Roots:
        """Return the storages that a value may be in."""
        return frozenset().union(*(self._roots.get(var, frozenset()) for var in _variables(value)))

    def _use(self, value: relax.Expr) -> Roots:
        roots = self.roots_of(value)
        for root in roots:
            self.found[root].last = self._now
        return roots


def _size(storage: relax.Call) -> int:
    return prod(map(int, cast(Any, storage.args[0]).values))


def _statements(branch: relax.Expr) -> list[relax.VarBinding]:
    return [relax.VarBinding(var, value) for var, value in bindings_of(branch)]


def _variables(value: relax.Expr) -> Iterator[relax.Var]:
    """Return the variables that the value is, or is made of."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.If):
        for branch in (value.true_branch, value.false_branch):
            assert isinstance(branch, relax.SeqExpr)
            yield from _variables(branch.body)
    elif isinstance(value, relax.TupleGetItem):
        yield from _variables(value.tuple_value)
    elif isinstance(value, relax.Call | relax.Tuple):
        for part in value.args if isinstance(value, relax.Call) else value.fields:
            yield from _variables(part)


@dataclass
class _Shared:
    """A storage of several buffers of a size. free: the statement from which the next one may have it."""

    call: relax.Call
    free: int = 0
    var: relax.Var = field(default_factory=lambda: relax.Var("storage", relax.ObjectType()))


def _storages(lives: Mapping[relax.Var, _Life]) -> dict[relax.Var, _Shared]:
    """Return for each storage the one that takes its place."""
    found = dict[relax.Var, _Shared]()
    # What a layer reports lives long and is small, so it must not take the place of what every layer needs.
    of_size = defaultdict[int, list[_Shared]](list)
    for var, life in lives.items():
        shared = next((s for s in of_size[life.size] if s.free <= life.first), None)
        if shared is None:
            shared = _Shared(life.call)
            of_size[life.size].append(shared)
        shared.free = life.last + 1
        found[var] = shared
    return found


class _BufferWriter:
    """Writes statements anew.

    Attributes:
        made: what makes the storages and the tensors.
        _tensors: by storage, shape and type, the tensor that stands for all such ones.
        _of: tensor -> its storage, and its type and device as a call has them.
    """

    def __init__(self, storages: dict[relax.Var, _Shared]) -> None:
        self._storages = storages
        self.made = [relax.VarBinding(s.var, s.call) for s in {id(s): s for s in storages.values()}.values()]
        self._tensors: dict[tuple[relax.Var, Shape, str], relax.Var] = {}
        self._values: Values = {}
        self._of: dict[relax.Var, tuple[relax.Var, Sequence[relax.Expr]]] = {}

    def rewritten(self, statements: Sequence[relax.VarBinding]) -> list[relax.VarBinding]:
        return [new for statement in statements for new in self._statement(statement.var, statement.value)]

    def _statement(self, var: relax.Var, value: relax.Expr) -> list[relax.VarBinding]:
        if var in self._storages:
            return []
        if isinstance(value, relax.Call) and value.args and isinstance(source := value.args[0], relax.Var):
            if value.op == _TENSOR and source in self._storages:
                return self._stand_in(var, self._storages[source].var, value.args[3:])
            if packed_name(value) == _VIEW and source in self._of:
                return self._stand_in(var, *self._of[source])
        if isinstance(value, relax.If):
            then, otherwise = map(self._branch, (value.true_branch, value.false_branch))
            return [relax.VarBinding(var, relax.If(replaced(value.cond, self._values), then, otherwise))]
        return [relax.VarBinding(var, replaced(value, self._values))]

    def _branch(self, branch: relax.Expr) -> relax.SeqExpr:
        assert isinstance(branch, relax.SeqExpr)
        inside = untyped.BindingBlock(self.rewritten(_statements(branch)))
        return relax.SeqExpr([inside], replaced(branch.body, self._values))

    def _stand_in(self, var: relax.Var, storage: relax.Var, rest: Sequence[relax.Expr]) -> list[relax.VarBinding]:
        """Let a tensor in a storage stand for the variable, which needs no statement then."""
        key = (storage, shape_of(var), str(cast(Any, var.ty).dtype))
        if key not in self._tensors:
            # A tensor begins where its storage does: kernels do not add the offset that `alloc_tensor` would note.
            call = relax.Call(_TENSOR, [storage, IntImm("int64", 0), untyped.ShapeExpr(key[1]), *rest])
            self._tensors[key] = relax.Var(var.name, var.ty)
            self.made.append(relax.VarBinding(self._tensors[key], call))
        self._values[var] = self._tensors[key]
        self._of[var] = (storage, rest)
        return []
