"""The pass framework: options as frozen dataclass fields, truthful `apply`, and options that round-trip as text."""

import inspect
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import fx

from fastcar_compile.errors import CompileError, InternalError, names_text
from fastcar_compile.gates.draft import Draft
from fastcar_compile.gates.weights import DIGEST, GateWeights, StoredLayers
from fastcar_compile.ir.layers import LAYER_KEYS
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.verifier import verify_program

_NAME = re.compile(r"[a-z0-9-]+")
_INFINITIES = ("inf", "-inf")
_STORED = {kind.FIELD: kind for kind in (GateWeights, Draft)}
"""Options that are files of weights, by their names; text has their digests."""


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite or analysis of a DecoderProgram. Fields of the dataclass are its options.

    `reason` is one sentence for the inspection page: why what the pass makes is in the graph.
    """

    name: ClassVar[str]
    reason: ClassVar[str]

    @abstractmethod
    def apply(self, program: DecoderProgram) -> bool:
        """Rewrite the program in place, and return whether anything was modified."""

    def to_spec(self) -> str:
        """Return `name` or `name{"option": value}` with the options as JSON, sorted by name."""
        options = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return f"{self.name}{json.dumps(options, sort_keys=True)}" if options else self.name


def _plain(value: object) -> object:
    """Return the option as JSON. JSON has no infinities: strings stand for them, and for weights their digest."""
    if value in _INFINITIES:
        raise InternalError(f"the text {value!r} cannot be an option of a pass: it would be read back as a number")
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in cast("Sequence[object]", value)]
    return value.name if isinstance(value, StoredLayers) else value


def _stored(option: str, value: object) -> object:
    """Return what the digest of a file of weights stands for."""
    if option in _STORED and isinstance(value, str) and DIGEST.fullmatch(value):
        return _STORED[option](value.removeprefix("sha256:"))
    return value


def _from_plain(value: object) -> object:
    if value in _INFINITIES:
        return float(str(value))
    if isinstance(value, list):
        return tuple(_from_plain(v) for v in cast("list[object]", value))
    return value


def pipeline_to_string(passes: Iterable[Pass]) -> str:
    """Return the pipeline as text, as the manifest keeps it."""
    return ",".join(p.to_spec() for p in passes)


def pipeline_from_string(text: str, registry: Mapping[str, type[Pass]]) -> list[Pass]:
    """Return the passes of `pipeline_to_string` text.

    Raises:
        CompileError: unknown pass, unknown option, an option of another type, or malformed text.
    """
    passes: list[Pass] = []
    end = 0
    # After a pass the loop goes on at the end of the text, too: a comma with no name behind it is malformed.
    while end < len(text) or passes:
        match = _NAME.match(text, end)
        if match is None:
            raise _malformed(text, end)
        name, end = match.group(), match.end()
        if name not in registry:
            raise CompileError(f"unknown pass '{name}'", hint=f"use one of: {names_text(sorted(registry), name)}")
        options, end = _options(text, end)
        known = {f.name for f in fields(registry[name])}
        if unknown := sorted(set(options) - known):
            raise CompileError(f"pass '{name}' has no option {unknown}", hint=f"its options: {sorted(known)}")
        options = {o: _stored(o, value) for o, value in options.items()}
        _check_types(registry[name], options)
        passes.append(registry[name](**options))
        if end == len(text):
            break
        if text[end] != ",":
            raise _malformed(text, end)
        end += 1
    return passes


def option_types(kind: type[Pass]) -> dict[str, str]:
    """Return the options of a pass -> their types, as its source writes them."""
    # A type is a text where the module postpones annotations.
    return {f.name: f.type if isinstance(f.type, str) else inspect.formatannotation(f.type) for f in fields(kind)}


def _check_types(kind: type[Pass], options: Mapping[str, object]) -> None:
    """Raise CompileError where an option's value is not of its type. Weights are no JSON, and known by digest only."""
    hints, defaults = get_type_hints(kind), {f.name: f.default for f in fields(kind)}
    for option, value in options.items():
        if value == defaults[option] or isinstance(value, StoredLayers):
            continue
        try:
            TypeAdapter(hints[option]).validate_python(value)
        except ValidationError as error:
            what = f"option {option} of pass '{kind.name}' is {value!r}: {error.errors()[0]['msg']}"
            raise CompileError(what, hint=f"its type is {option_types(kind)[option]}") from error


def _no_number(name: str) -> float:
    raise ValueError(f"JSON has no number {name}")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _options(text: str, start: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object at `start`, if there is one, and the index after it."""
    if not text.startswith("{", start):
        return {}, start
    try:
        # A JSON reader, not a pattern: braces and commas also occur inside of strings and nested values.
        options, end = _DECODER.raw_decode(text, start)
        return {k: _from_plain(v) for k, v in options.items()}, end
    except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, or brackets as deep
        raise _malformed(text, start) from error


def _malformed(text: str, at: int) -> CompileError:
    hint = 'write passes with commas between them, and options as JSON behind a name: a,b{"c": 1}'
    return CompileError(f"malformed pipeline text at character {at}: {text[at : at + 40]!r}", hint=hint)


def run_pipeline(
    program: DecoderProgram,
    passes: Iterable[Pass],
    *,
    verify_each: bool = True,
    after_each: Callable[[Pass], None] | None = None,
) -> DecoderProgram:
    """Apply passes in order, and return the program. It is verified before the first pass and after each.

    Args:
        verify_each: False verifies before the first and after the last pass only.
        after_each: called after every pass.

    Raises:
        InternalError: a pass broke an invariant, or lied about having modified the program.
    """
    verify_program(program, "before the first pass")
    # Fingerprints are compared by value: a pass must say truthfully whether it modified anything.
    before = _fingerprint(program)
    for item in passes:
        modified = item.apply(program)
        after = _fingerprint(program)
        if modified != (before != after):
            raise InternalError(f"pass {item.name} says modified={modified}, but the program tells otherwise")
        if verify_each:
            verify_program(program, f"after pass {item.name}")
        program.reasons[item.name] = item.reason
        program.log.append(f"{item.to_spec()}: {'modified' if modified else 'unchanged'}")
        before = after
        if after_each is not None:
            after_each(item)
    if not verify_each:
        verify_program(program, "after the last pass")
    # Passes edit graphs. The Python code of a module is generated anew once, at the end.
    for module in program.all_graphs():
        module.recompile()
    return program


def _fingerprint(program: DecoderProgram) -> tuple[object, ...]:
    graphs = tuple(_graph_fingerprint(module) for module in program.all_graphs())
    names = (program.outputs, program.prefill_outputs, program.context_outputs)
    signature = (*map(tuple, names), program.config)
    return (*graphs, tuple(program.state), *signature)


def _graph_fingerprint(module: fx.GraphModule) -> tuple[object, ...]:
    """Every node of a graph and of its branches; fx keeps arguments in tuples and lists that cannot be modified."""
    nodes = tuple(
        (n.name, n.op, n.target, n.args, n.kwargs, *(n.meta.get(k) for k in LAYER_KEYS)) for n in module.graph.nodes
    )
    branches = [(name, m) for name, m in module.named_children() if isinstance(m, fx.GraphModule)]
    return (nodes, *((name, _graph_fingerprint(branch)) for name, branch in branches))
