"""The version of this package: the version of the installed distribution, which is built from git's tags."""

import hashlib
import platform
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

from fastcar_compile.errors import BackendError, UserError, names_text

NAME = "fastcar_compile"
TEMPLATES = "hls_templates"
"""Package of the HLS sources and templates."""
UNKNOWN = "0+unknown"
"""Version of a source tree that is on the path and not installed."""


def installed_version() -> str:
    """Return the version: the newest tag, with `.post1.devN` for N commits since."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def release() -> str:
    """Return the release that the version belongs to, without the commits since.

    Artifacts name it. A clone without tags does not know the number of commits, and writes the same bytes.
    """
    return Version(installed_version()).base_version


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of Python and of these distributions; "none" where one is not installed."""
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def installed_names() -> list[str]:
    """Return name and version of every installed distribution, as its folder of metadata is called, and of Python.

    The first text is this file as `import` sees it: graphs name the sources of their nodes in that way.
    """
    seen = [__file__[len(entry) :] for entry in sys.path if entry and __file__.startswith(entry.rstrip("/") + "/")]
    found = (path.name for entry in sys.path for path in Path(entry or ".").glob("*.dist-info"))
    return [min(seen, key=len, default=""), platform.python_version(), *sorted(found)]


@cache
def sources_digest() -> str | None:
    """Return a digest of the files of this package, of its HLS templates, and of the packages that plug into it.

    None: one of them was written since this process began, which may run an earlier one.
    """
    import psutil  # here: most commands need no key

    points = (point for found in metadata.distributions() for point in found.entry_points)
    plug_ins = {point.module.partition(".")[0] for point in points if point.group.startswith(f"{NAME}.")}
    digest, began = hashlib.sha256(), psutil.Process().create_time()
    for name in sorted(plug_ins | {NAME, TEMPLATES}):
        spec = find_spec(name)
        for root in () if spec is None else map(Path, spec.submodule_search_locations or [spec.origin or ""]):
            for path in sorted(root.rglob("*") if root.is_dir() else [root]):
                if path.is_file() and path.parent.name != "__pycache__":
                    if path.stat().st_ctime > began:
                        return None
                    digest.update(f"{name}/{path.relative_to(root)}\0".encode())
                    digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextmanager
def needs(extra: str) -> Generator[None]:
    """Raise an error that names the extra to install where an import of the block fails.

    Raises:
        BackendError: a package that the extra brings is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "fastcar_compile"):
            raise
        what, hint = f"the package {package} is not installed", f'pip install "fastcar_compile[{extra}]"'
        raise BackendError(what, where=f"import {error.name}", hint=hint) from error


def require(extra: str, *packages: str) -> None:
    """Raise unless the packages of an extra are installed, before work that would be lost without them.

    Raises:
        BackendError: a package is missing.
    """
    with needs(extra):
        for name in packages:
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)


def pyplot() -> Any:
    """Return matplotlib.pyplot, which draws without a display.

    Raises:
        BackendError: matplotlib is not installed.
    """
    with needs("evaluate"):
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")


@dataclass(frozen=True)
class Registry:
    """Objects by name. An object is imported when a caller asks for it.

    Args:
        what: noun for one object, for error texts.
        group: group of the entry points; their names may not be built in.
        built_in: name -> "module:attribute".
        error: raised for an unknown name.
        extras: name -> the extra of this package that it needs, where that is not `compile`.
    """

    what: str
    group: str
    built_in: Mapping[str, str]
    error: type[UserError]
    extras: Mapping[str, str] = field(default_factory=dict[str, str])

    def added(self) -> dict[str, EntryPoint]:
        """Return the entry points of other packages by name, sorted.

        Raises:
            UserError: a name is registered twice, by this package or by two other packages.
        """
        found: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=self.group), key=lambda p: p.name):
            if point.name in self.built_in or (point.name in found and found[point.name].value != point.value):
                what = f"{self.what} {point.name!r} is registered twice"
                hint = "give it another name, or uninstall one of the packages"
                raise self.error(what, where=f"entry point {point.value}, group {self.group}", hint=hint)
            found[point.name] = point
        return found

    def names(self) -> list[str]:
        """Return every name, the names of this package first."""
        return [*self.built_in, *self.added()]

    def load(self, name: str) -> Any:
        """Return the object of that name.

        Raises:
            UserError: the name is not known, or its package cannot be imported.
        """
        if name in self.built_in:
            module, _, attribute = self.built_in[name].partition(":")
            with needs(self.extras.get(name, "compile")):
                return getattr(import_module(module), attribute)
        added = self.added()
        if name not in added:
            raise self.error(f"unknown {self.what} {name!r}", hint=f"use one of: {names_text(self.names(), name)}")
        try:
            return added[name].load()
        except Exception as error:  # the code of others
            where = f"entry point {added[name].value}"
            raise self.error(f"{self.what} {name!r} cannot be imported: {error}", where=where) from error
