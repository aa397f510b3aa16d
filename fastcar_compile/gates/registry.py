"""Gates by name: from this package, and from other packages that register entry points."""

import inspect
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from fastcar_compile.errors import CompileError, names_text
from fastcar_compile.gates.base import Comparison, FabricGate, Gate, Rotary
from fastcar_compile.gates.input_delta import InputDeltaGate
from fastcar_compile.gates.learned import LearnedGate
from fastcar_compile.gates.study import AlwaysGate, NeverGate, RandomGate
from fastcar_compile.gates.tas import TasGate
from fastcar_compile.gates.weights import LayerWeights

ENTRY_POINTS = "fastcar_compile.gates"
"""The group of entry points; each names a subclass of `Gate`, for example `peak = "my_package:PeakGate"`."""

_FABRIC: dict[str, type[FabricGate]] = {g.name: g for g in (TasGate, InputDeltaGate, LearnedGate)}
_BUILT_IN: dict[str, type[Gate]] = {**_FABRIC, **{g.name: g for g in (AlwaysGate, NeverGate, RandomGate)}}


class GateKind(IntEnum):
    """The score that a control table's controller computes, as the table numbers it; a kernel is built for one."""

    TAS = 1
    INPUT_DELTA = 2
    LEARNED = 3

    @property
    def gate(self) -> type[FabricGate]:
        """The gate's class."""
        return _FABRIC[self.name.lower()]

    @property
    def at_most(self) -> bool:
        """Whether small scores replay: the controller then compares minus score and minus threshold."""
        return self.gate.comparison is Comparison.AT_MOST

    @property
    def reads_query(self) -> bool:
        """Whether q and the cached key are operands."""
        return self.gate.reads_query

    @property
    def reads_input(self) -> bool:
        """Whether the MLP's input and its cached value are operands."""
        return self.gate.caches_input


class GateRegistry(Mapping[str, type[Gate]]):
    """Every gate class by its name. Other packages are searched only for a name that this package does not have."""

    @cached_property
    def _registered(self) -> dict[str, type[Gate]]:
        return {entry.name: _load(entry) for entry in entry_points(group=ENTRY_POINTS)}

    def forget(self) -> None:
        """Search other packages again at the next unknown name: one was installed, or removed."""
        self.__dict__.pop("_registered", None)

    def __getitem__(self, name: str) -> type[Gate]:
        """Return the class; see Mapping."""
        return _BUILT_IN[name] if name in _BUILT_IN else self._registered[name]

    def __iter__(self) -> Iterator[str]:
        yield from _BUILT_IN
        yield from self._registered

    def __len__(self) -> int:
        return len(_BUILT_IN) + len(self._registered)


def _load(entry: EntryPoint) -> type[Gate]:
    """Return the gate class of an entry point.

    Raises:
        CompileError: the class cannot be imported, is not a complete gate, has another name, or takes a name of this
            package.
    """
    where = f"entry point {entry.value!r} of group {ENTRY_POINTS!r}"
    try:
        found: object = entry.load()
    except (ImportError, AttributeError) as error:
        hint = "correct or remove the package that registers it"
        raise CompileError(f"gate {entry.name!r} cannot be loaded: {error}", where=where, hint=hint) from error
    if not (isinstance(found, type) and issubclass(found, Gate)) or inspect.isabstract(found):
        hint = "name a subclass of fastcar_compile.gates.Gate with `score` and `describe`"
        raise CompileError(f"gate {entry.name!r} is not a gate class", where=where, hint=hint)
    if getattr(found, "name", None) != entry.name or entry.name in _BUILT_IN:
        hint = f"give the class and the entry point one name that is not {', '.join(_BUILT_IN)}"
        raise CompileError(f"gate {entry.name!r} has a name that does not fit", where=where, hint=hint)
    return found


GATES = GateRegistry()


def gate_class(name: str) -> type[Gate]:
    """Return the gate class of that name.

    Raises:
        CompileError: no gate has this name.
    """
    if name not in GATES:
        raise CompileError(f"unknown gate {name!r}", hint=f"known gates: {names_text(GATES, name)}")
    return GATES[name]


def gate_named(
    name: str,
    heads: tuple[tuple[int, float], ...] | None = None,
    weights: LayerWeights | None = None,
    rotary: Rotary = "both",
) -> Gate:
    """Return the gate of that name with its options.

    Args:
        heads: (query head, weight) pairs, for a gate that averages over heads.
        weights: weights of this layer, for a trained gate.
        rotary: "key" for a gate that compares the query with a key.

    Raises:
        CompileError: the name is unknown, or the gate does not take heads, weights or `rotary`.
    """
    kind = gate_class(name)
    if heads is not None and not kind.takes_heads:
        hint = f"leave heads out, or use {_those('takes_heads')}"
        raise CompileError(f"gate {name!r} does not average over heads", hint=hint)
    if weights is not None and not kind.takes_weights:
        hint = f"leave the weights out, or use {_those('takes_weights')}"
        raise CompileError(f"gate {name!r} has no weights", hint=hint)
    if rotary == "key" and not kind.reads_query:
        hint = f"leave rotary out, or use {_those('reads_query')}"
        raise CompileError(f"gate {name!r} compares no query with a key", hint=hint)
    return kind(heads=heads, weights=weights, rotary=rotary)


def weights_problem(name: str, given: bool) -> str | None:
    """Return the problem where weights are given to a gate that takes no weights, or are missing; None: no problem."""
    if given and not GATES[name].takes_weights:
        return f"gate {name!r} has no weights: leave gate_weights out, or use {_those('takes_weights')}"
    if not given and GATES[name].takes_weights:
        return f"gate {name!r} needs its weights: give gate_weights, the file that was trained"
    return None


def _those(fact: str) -> str:
    """Return the gates that have a fact, as `gate tas` or `one of: a, b`."""
    names = [name for name, gate in GATES.items() if getattr(gate, fact)]
    return f"gate {names[0]}" if len(names) == 1 else f"one of: {', '.join(names)}"


def decided_on_accelerator(gate: str) -> bool:
    """Return whether the accelerator's controller has this gate: a gate of this package that is not a study.

    The host decides every other gate.
    """
    return gate in _FABRIC
