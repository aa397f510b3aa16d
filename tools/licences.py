"""Licences of what the package needs: the table in docs/reference/licences.md, from the installed packages' metadata.

    python tools/licences.py > docs/reference/licences.md

A licence that the list below does not know ends it with an error, so that somebody reads the licence first.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "fastcar-compile"
ROOT = Path(__file__).parents[1]
PROJECT, PLAY = (tomllib.loads((ROOT / p / "pyproject.toml").read_text("utf-8"))["project"] for p in ("", "play"))
EXTRAS = ("", "compile", "onnxruntime", "train", "csim", "evaluate", "sign", "play")
"""What users install; "" is a device, "play" the plug-in. Tools of development are not distributed with anything."""

ACCEPTED = frozenset(
    [
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "LGPL-3.0-only",
        "LLVM-exception",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    ]
)
"""SPDX identifiers that may stand beside Apache-2.0 in an installation."""

CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Classifiers of packages without a License-Expression -> SPDX."""

TEXTS = {
    "Apache 2.0": "Apache-2.0", "Apache License 2.0": "Apache-2.0", "Apache License, Version 2.0": "Apache-2.0",
    "Apache License v2.0": "Apache-2.0", "Apache 2.0 License": "Apache-2.0", "Apache-2.0 License": "Apache-2.0",
    "BSD": "BSD-3-Clause", "3-Clause BSD License": "BSD-3-Clause", "BSD 3-Clause": "BSD-3-Clause",
    "MIT License": "MIT", "PSF": "PSF-2.0",
}  # fmt: skip
"""Texts of the older field License -> SPDX."""

OWN: dict[str, list[str]] = {
    "": PROJECT["dependencies"], "play": PLAY["dependencies"], **PROJECT["optional-dependencies"],
}  # fmt: skip
"""Extra -> requirements."""

READ = {"matplotlib": "PSF-2.0", "sigstore-models": "MIT"}
"""Packages whose metadata name no licence -> what their licence file is, as somebody read it."""


@dataclass(frozen=True)
class Row:
    """A package, its licence as an SPDX expression, what needs it, and whether this package names it itself."""

    name: str
    licence: str
    extras: tuple[str, ...]
    direct: bool


class UnknownLicence(Exception):
    """A licence that nobody has accepted yet."""


def licence_of(name: str) -> str:
    """Return the SPDX expression of an installed package, "" where its metadata have none that is known."""
    if name in READ:
        return READ[name]
    found = metadata.metadata(name)
    if "License-Expression" in found:
        return found["License-Expression"]
    names = [c.rpartition(" :: ")[2] for c in found.get_all("Classifier", []) if c.startswith("License :: ")]
    known = [CLASSIFIERS[n] for n in names if n in CLASSIFIERS]
    if known:
        return " OR ".join(dict.fromkeys(known))
    text = next(iter(found.get_all("License", [])), "").strip()
    return TEXTS.get(text, text if accepted(text) else "")


def accepted(expression: str) -> bool:
    """Return whether every identifier of an SPDX expression is accepted, those of alternatives too."""
    words = set(re.split(r"\s+(?:AND|OR|WITH)\s+", expression.replace("(", "").replace(")", "")))
    return words <= ACCEPTED


def requirements(name: str, extra: str) -> Iterator[Requirement]:
    """Return what a package requires here with an extra; for PACKAGE what pyproject.toml says."""
    texts = metadata.requires(name) or [] if name != PACKAGE else OWN[extra]
    for wanted in map(Requirement, texts):
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            yield wanted


def closure(extra: str) -> set[str]:
    """Return the installed packages that PACKAGE needs with an extra, directly or not; canonical names."""
    waiting, seen = [(PACKAGE, extra), (PACKAGE, "")], set[tuple[str, str]]()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for requirement in requirements(name, wanted):
            needed = canonicalize_name(requirement.name)
            waiting += [(needed, e) for e in ("", *requirement.extras)]
    return {name for name, _ in seen} - {PACKAGE}


def rows() -> list[Row]:
    """Return a row per package.

    Raises:
        UnknownLicence: of the packages that it names.
    """
    by_extra = {extra: closure(extra) for extra in EXTRAS}
    own = {canonicalize_name(r.name) for extra in EXTRAS for r in requirements(PACKAGE, extra)}
    device = by_extra.pop("")
    found: list[Row] = []
    for name in sorted(device.union(*by_extra.values())):
        extras = ("device",) if name in device else tuple(e for e, names in by_extra.items() if name in names)
        found.append(Row(name, licence_of(name), extras, name in own))
    unknown = [f"{row.name}: {row.licence or 'none named'}" for row in found if not accepted(row.licence)]
    if unknown:
        raise UnknownLicence("read these licences, then extend tools/licences.py: " + "; ".join(unknown))
    return found


def table(found: list[Row]) -> str:
    """Return the document."""
    lines = [
        "# Licences",
        "",
        "fastcar_compile is under Apache-2.0. These are the packages that an installation brings, with the",
        "licences that their metadata name, as SPDX expressions. *device* is the base installation, *play* the plug-in",
        "`fastcar_play`, and other words are extras. `pyproject.toml` names the bold packages; the others come with",
        "them. `python tools/licences.py` writes this page, on Linux and x86-64 with PyTorch for CPUs. A test fails",
        "where a licence is not known.",
        "",
        "An artifact holds none of these packages. It holds code that TVM generated, and HLS headers and C++",
        "programs of this project.",
        "",
        "| package | licence | with |",
        "|---|---|---|",
    ]
    for row in found:
        name = f"**{row.name}**" if row.direct else row.name
        lines.append(f"| {name} | {row.licence} | {', '.join(row.extras)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the document; return 1 for an unknown licence."""
    try:
        print(table(rows()), end="")
    except UnknownLicence as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
