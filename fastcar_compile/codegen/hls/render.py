"""Jinja templates of the HLS sources. A text of a model or of a target file cannot become code in them."""

from __future__ import annotations

import re
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from fastcar_compile.errors import InternalError

TEMPLATES = "hls_templates"

_PLAIN = re.compile(r"[ -~]*")
_BEYOND = re.compile(r"[\"'\\`$?]|/[/*]|\*/")
"""What ends a text, begins a comment or a directive, or means something to make and to a shell."""


class Literal(str):
    """A C++ string literal with its quotes."""


def literal(text: str) -> Literal:
    """Return a text as a C++ string literal of its UTF-8 bytes."""
    return Literal('"' + "".join(map(_escaped, text.encode("utf-8"))) + '"')


def _escaped(byte: int) -> str:
    sign = chr(byte)
    # Three octal digits end by themselves. A question mark could begin a trigraph.
    return f"\\{byte:03o}" if byte not in range(32, 127) or sign in '"\\?' else sign


def render(name: str, **values: object) -> str:
    """Return the text of `hls_templates/<name>.j2` with these values; a name that has none is an error.

    Raises:
        InternalError: a text that may not stand in code, and is not written through the filter `literal`.
    """
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, finalize=_harmless
    )
    environment.filters["literal"] = literal
    return environment.from_string((files(TEMPLATES) / f"{name}.j2").read_text()).render(**values)


def _harmless(value: object) -> object:
    if not isinstance(value, str) or isinstance(value, Literal):
        return value
    if not _PLAIN.fullmatch(value) or _BEYOND.search(value):
        raise InternalError(f"the text {value!r:.80} cannot stand in generated code")
    return value
