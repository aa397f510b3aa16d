"""The pass framework: options as frozen dataclass fields, truthful `apply`, and options that round-trip as text."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import fx

from fastcar_compile.errors import CompileError, InternalError
from fastcar_compile.gates.weights import DIGEST, GateWeights
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.verifier import verify_program

_NAME = re.compile(r"[a-z0-9-]+")
_INFINITIES = ("inf", "-inf")


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite or analysis of a DecoderProgram. Fields of the dataclass are its options."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, program: DecoderProgram) -> bool:
        """Rewrite the program in place; returns whether anything was modified."""

    def to_spec(self) -> str:
        """`name` or `name{"option": value}` with the options as JSON, sorted by name."""
        options = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return f"{self.name}{json.dumps(options, sort_keys=True)}" if options else self.name


def _plain(value: object) -> object:
    """JSON has no infinities: they are written as strings, which no text option may then be; of weights, the digest."""
    if value in _INFINITIES:
        raise InternalError(f"the text {value!r} cannot be an option of a pass: it would be read back as a number")
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.name if isinstance(value, GateWeights) else value


def _from_plain(value: object) -> object:
    if value in _INFINITIES:
        return float(str(value))
    if isinstance(value, list):
        return tuple(_from_plain(v) for v in value)
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return GateWeights(value.removeprefix("sha256:"))
    return value


def pipeline_to_string(passes: Iterable[Pass]) -> str:
    """The pipeline as text, as kept in the manifest."""
    return ",".join(p.to_spec() for p in passes)


def pipeline_from_string(text: str, registry: Mapping[str, type[Pass]]) -> list[Pass]:
    """Passes from `pipeline_to_string` text.

    Raises:
        CompileError: unknown pass, unknown option or malformed text.
    """
    passes: list[Pass] = []
    end = 0
    while end < len(text) or passes:
        match = _NAME.match(text, end)
        if match is None:
            raise _malformed(text, end)
        name, end = match.group(), match.end()
        if name not in registry:
            raise CompileError(f"unknown pass '{name}'", hint=f"use one of: {', '.join(sorted(registry))}")
        options, end = _options(text, end)
        known = {f.name for f in fields(registry[name])}
        if unknown := sorted(set(options) - known):
            raise CompileError(f"pass '{name}' has no option {unknown}", hint=f"its options: {sorted(known)}")
        passes.append(registry[name](**options))
        if end == len(text):
            break
        if text[end] != ",":
            raise _malformed(text, end)
        end += 1
    return passes


def _options(text: str, start: int) -> tuple[dict[str, Any], int]:
    """The JSON object at `start`, if there is one, and the index after it."""
    if not text.startswith("{", start):
        return {}, start
    try:
        # A JSON reader, not a pattern: braces and commas also occur inside of strings and nested values.
        options, end = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise _malformed(text, start) from error
    return {k: _from_plain(v) for k, v in options.items()}, end


def _malformed(text: str, at: int) -> CompileError:
    return CompileError(f"malformed pipeline text at character {at}: {text[at : at + 40]!r}")


def run_pipeline(program: DecoderProgram, passes: Iterable[Pass]) -> DecoderProgram:
    """Apply passes in order; the program is verified before and after each.

    Raises:
        InternalError: a pass broke an invariant, or lied about having modified the graph.
    """
    verify_program(program, "before the first pass")
    before = _fingerprint(program)
    for item in passes:
        modified = item.apply(program)
        after = _fingerprint(program)
        if modified != (before != after):
            raise InternalError(f"pass {item.name} says modified={modified}, but the program tells otherwise")
        verify_program(program, f"after pass {item.name}")
        program.log.append(f"{item.to_spec()}: {'modified' if modified else 'unchanged'}")
        before = after
    for module in program.graphs():
        module.recompile()
    return program


def _fingerprint(program: DecoderProgram) -> tuple[object, ...]:
    graphs = tuple(_graph_fingerprint(module) for module in program.graphs())
    signature = (tuple(program.outputs), tuple(program.prefill_outputs), program.config)
    return (*graphs, tuple(program.sites), tuple(program.state), *signature)


def _graph_fingerprint(module: fx.GraphModule) -> tuple[object, ...]:
    """Every node of a graph and of its branches; fx keeps arguments in tuples and lists that cannot be modified."""
    nodes = tuple((n.name, n.op, n.target, n.args, n.kwargs) for n in module.graph.nodes)
    branches = [(name, m) for name, m in module.named_children() if isinstance(m, fx.GraphModule)]
    return (nodes, *((name, _graph_fingerprint(branch)) for name, branch in branches))
