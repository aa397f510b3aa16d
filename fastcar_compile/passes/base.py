"""The pass framework: options as frozen dataclass fields, truthful `apply`, and options that round-trip as text."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from fastcar_compile.errors import CompileError, InternalError
from fastcar_compile.ir import DecoderProgram
from fastcar_compile.passes.verify import verify_program

_PASS = re.compile(r"([a-z0-9-]+)(\{.*?\})?(?:,|$)")


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
    """JSON has no infinities: they are written as strings."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _from_plain(value: object) -> object:
    if value in ("inf", "-inf"):
        return float(str(value))
    if isinstance(value, list):
        return tuple(_from_plain(v) for v in value)
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
    for match in _PASS.finditer(text):
        if match.start() != end:
            break
        name, options = match.group(1), match.group(2)
        if name not in registry:
            raise CompileError(f"unknown pass '{name}'", mend=f"use one of: {', '.join(sorted(registry))}")
        arguments = {k: _from_plain(v) for k, v in json.loads(options or "{}").items()}
        known = {f.name for f in fields(registry[name])}
        if unknown := sorted(set(arguments) - known):
            raise CompileError(f"pass '{name}' has no option {unknown}", mend=f"its options: {sorted(known)}")
        passes.append(registry[name](**arguments))
        end = match.end()
    if end != len(text):
        raise CompileError(f"malformed pipeline text at character {end}: {text[end : end + 40]!r}")
    return passes


def run_pipeline(program: DecoderProgram, passes: Iterable[Pass]) -> DecoderProgram:
    """Apply passes in order; the program is verified before and after each.

    Raises:
        InternalError: a pass broke an invariant, or lied about having modified the graph.
    """
    verify_program(program, "before the first pass")
    for item in passes:
        before = _fingerprint(program)
        modified = item.apply(program)
        for module in program.graphs():
            module.recompile()
        if modified != (before != _fingerprint(program)):
            raise InternalError(f"pass {item.name} says modified={modified}, but the program tells otherwise")
        verify_program(program, f"after pass {item.name}")
        program.log.append(f"{item.to_spec()}: {'modified' if modified else 'unchanged'}")
    return program


def _fingerprint(program: DecoderProgram) -> tuple[object, ...]:
    graphs = tuple(module.print_readable(print_output=False) for module in program.graphs())
    return (*graphs, tuple(program.sites), tuple(program.state), tuple(program.outputs))
