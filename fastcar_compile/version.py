"""The version of this package: that of the installed distribution, which is built from git's tags."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

NAME = "fastcar_compile"
UNKNOWN = "0+unknown"
"""Of a source tree that is on the path and not installed."""


def installed_version() -> str:
    """Return the version: that of the newest tag, with `.post1.devN` for N commits since."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def release() -> str:
    """Return the release that the version belongs to, without the commits since.

    Artifacts name it. A clone without tags does not know the number of commits, and writes the same bytes.
    """
    return Version(installed_version()).base_version
