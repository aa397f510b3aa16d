"""How a command was called: which options are given, which of them need others, and errors in these words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastcar_compile.config.listing import Needs, Without
from fastcar_compile.config.options import PARTS, option_words
from fastcar_compile.errors import CompileError, UserError


@dataclass(frozen=True)
class CommandCall:
    """The words of a command line.

    Attributes:
        flags: parameter of the command -> its option, for example "--top-k", or its argument, for example "ARTIFACT".
        given: the parameters that the command line has.
    """

    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    given: frozenset[str] = frozenset()


CALL: ContextVar[CommandCall] = ContextVar("CALL", default=CommandCall())  # noqa: B039  (frozen)
"""The command that runs; of a command that is called as a function, it has no words."""


def check_effects(marks: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> None:
    """Raise unless every option that is given has an effect.

    Args:
        marks: parameter -> what its annotation says. values: parameter -> its value.

    Raises:
        UserError: it names every option without effect.
    """
    call, found = CALL.get(), dict[tuple[str, str, str], list[str]]()
    for name in (name for name in marks if name in call.given):
        for mark in marks[name]:
            if isinstance(mark, Needs) and not mark.met(values):
                other = " ".join([call.flags[mark.name], *([] if mark.value is None else [str(mark.value)])])
                found.setdefault((f"needs {other}", f"need {other}", f"give {other}"), []).append(call.flags[name])
            elif isinstance(mark, Without) and mark.name in call.given:
                why = f"no effect with {call.flags[mark.name]}", f"leave {call.flags[mark.name]} out"
                found.setdefault((f"has {why[0]}", f"have {why[0]}", why[1]), []).append(call.flags[name])
    if found:
        what = [f"{' and '.join(flags)} {one if len(flags) == 1 else more}" for (one, more, _), flags in found.items()]
        hint = [f"{how}, or leave {' and '.join(flags)} out" for (_, _, how), flags in found.items()]
        raise UserError("; ".join(what), hint="; ".join(hint))


_OWNERS = ("CompileConfig", *(kind.__name__ for kind in PARTS.values()), "Sampling", "Jacobi", "Cache")
_OF_CACHE = {"remote": "cache", "write": "cache_write", "libraries": "cache_libraries"}
_WORDS = {part.name: word for word, _, part in option_words() if part.name != word} | _OF_CACHE
"""Fields of a configuration -> the command's parameters, where their names differ."""
_FIRST = {field.name: word for word, field, part in reversed([*option_words()]) if part is not field}
"""Options that are several ones of the command -> the first one of these."""


def in_words_of(call: CommandCall, error: UserError) -> UserError:
    """Return an error of a function of the package in the words of the command that called the function.

    An option is told by its owner (`CompileConfig.quant`), its value (`quant='w8a9'`), an underscore (`top_k`), or its
    place at the beginning of a clause (`the lag is 4`).
    """
    if error.problems:
        return CompileError.collect([in_words_of(call, problem) for problem in error.problems])
    flags = {name: flag for name, flag in call.flags.items() if flag.startswith("--")}
    flags |= {name: flags[other] for name, other in _WORDS.items() if other in flags}
    if not flags:
        return error
    owner, names = f"(?:{'|'.join(_OWNERS)})", "|".join(sorted(flags, key=len, reverse=True))
    rules = (
        rf"(?:(?<=; )|^)(?:the )?(?P<name>{names})(?=:? is |: | are )",
        rf"{owner}\.(?P<name>{names})(?:\.\w+)*",
        rf"(?<![\w.'\"`/-])(?P<name>{names})=(?P<value>'[^']*'|\"[^\"]*\"|[^\s,;:)]+)",
        rf"(?<![\w.'\"`/-])(?P<name>(?=[a-z]+_)(?:{names}))(?![\w('\"`=\[]|\.\w)",
        rf"(?<=\bleave )(?P<name>{names})(?= out)",
    )

    def translated(text: str) -> str:
        text = re.sub(rf"^{owner} is not valid: (?:\(whole\): )?", "", text)
        for rule in rules:
            text = re.sub(rule, spelt, text)
        return text

    def spelt(found: re.Match[str]) -> str:
        flag, value = flags[found["name"]], (found.groupdict().get("value") or "True").strip("'\"")
        return {"True": flag, "False": f"no {flag}"}.get(value, f"{flag} {value}")

    places = {name: flags[word] for name, word in _FIRST.items() if word in flags} | flags
    where = "" if error.where in _OWNERS else places.get(error.where, translated(error.where))
    return type(error)(translated(error.what), where=where, hint=translated(error.hint))
