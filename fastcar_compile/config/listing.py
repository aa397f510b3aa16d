"""What stands beside an option in its annotation: where the command line shows it, its values, and what it needs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from fastcar_compile.errors import names_text

_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A name and its text in the `Args:` of a docstring."""


def described(thing: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring before its `Args:`, and the text of every name there."""
    summary, _, rest = cleandoc(thing.__doc__ or "").partition("\n\nArgs:\n")
    return summary, {name: " ".join(text.split()) for name, text in _ENTRY.findall(rest.partition("\n\n")[0])}


@dataclass(frozen=True)
class Listing:
    """Where the command line shows an option.

    Args:
        panel: its heading; empty: that of the option which it is a part of.
        expert: `--help` leaves it out. decided: where nobody gives it, target and model decide (`resolve`).
        word: what the command line calls it; empty: as here.
    """

    panel: str = ""
    expert: bool = False
    decided: bool = False
    word: str = ""


@dataclass(frozen=True)
class Needs:
    """Marks an option that has an effect only beside another one.

    Args:
        name: parameter of the other option. value: the value that it has to have; None: any that is true.
    """

    name: str
    value: object = None

    def met(self, values: Mapping[str, Any]) -> bool:
        """Return whether the other option has its value."""
        found = values.get(self.name)
        return bool(found) if self.value is None else found == self.value


@dataclass(frozen=True)
class Without:
    """Marks an option that has no effect beside another one.

    Args:
        name: parameter of the other option.
    """

    name: str


@dataclass(frozen=True)
class Listed:
    """An option of the list.

    Args:
        name: of the field. kind: its type. default: None where there is none. marks: of its annotation.
        help: the first sentence of what its class says of it.
    """

    name: str
    kind: Any
    default: object
    marks: tuple[Any, ...]
    help: str

    @property
    def listing(self) -> Listing:
        """Where the command line shows it."""
        return next((mark for mark in self.marks if isinstance(mark, Listing)), Listing())


def listed(owner: type[Any]) -> Iterator[Listed]:
    """Yield the options of a pydantic model or a dataclass, in the order of the `Args:` of its docstring."""
    fields: Mapping[str, FieldInfo] = getattr(owner, "model_fields", {})
    for name, text in described(owner)[1].items():
        given, field = owner.__annotations__[name], fields.get(name)
        kind, *marks = get_args(given) if get_origin(given) is Annotated else (given,)
        default = getattr(owner, name, None) if field is None else None if field.is_required() else field.default
        first = text.split(". ")[0].removesuffix(".")
        yield Listed(name, kind, default, tuple(marks), f"{first[0].upper()}{first[1:]}.")


def one_of(known: Mapping[str, object], what: str, listed: str = "known") -> AfterValidator:
    """Return a validator of names that a registry has; its function's keyword `known` is the registry."""
    return AfterValidator(partial(_known, known=known, what=what, listed=listed))


def _known(name: str, known: Mapping[str, object], what: str, listed: str) -> str:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; {listed}: {names_text(known, name)}")
    return name
