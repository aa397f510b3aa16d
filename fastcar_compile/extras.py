"""Parts of the package that an installation may lack, and the command that adds them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fastcar_compile.errors import BackendError


@contextmanager
def needs(extra: str) -> Generator[None]:
    """Name the extra to install where an import of the block fails.

    Raises:
        BackendError: a package that the extra brings is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "fastcar_compile"):
            raise
        hint = f'pip install "fastcar_compile[{extra}]"'
        raise BackendError(
            f"the package {package} is not installed", where=f"import {error.name}", hint=hint
        ) from error
