"""`fastcar cache`: what the build cache holds, and its trimming."""

import re
from pathlib import Path
from typing import Annotated

from typer import Option

import fastcar_compile as fc
from fastcar_compile.cli.common import JsonOption, command
from fastcar_compile.cli.output import print_fields, print_result
from fastcar_compile.errors import UserError, size_text

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@command
def cache_command(
    folder: Annotated[Path | None, Option()] = None,
    trim: Annotated[str | None, Option(metavar="SIZE")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the build cache holds, or trim it.

    Args:
        folder: Folder of the cache; default: builds in $FASTCAR_CACHE.
        trim: Remove what was used least recently, until at most this is left, such as 10GB or 0.
    """
    cache = fc.Cache(folder)
    if trim is not None:
        cache.trim(_bytes(trim))
    size, entries = sum(cache.sizes().values()), len(cache.entries())
    facts = {"folder": str(cache.folder), "bytes": size, "entries": entries}
    fields = {"folder": str(cache.folder), "size": size_text(size), "entries": str(entries)}
    print_result(as_json, facts, lambda: print_fields(fields))


def _bytes(text: str) -> int:
    """Return the bytes of a size such as "10GB".

    Raises:
        UserError: it is not a size.
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UserError(f"{text!r} is not a size", where="--trim", hint="give for example 10GB, or 0")
    return int(float(found[1]) * _UNITS[found[2].upper()])
