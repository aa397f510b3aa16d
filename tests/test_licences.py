"""What an installation brings: its licences, all known and in the document, and its versions."""

import re
import shlex
import subprocess
import sys
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import licences  # noqa: E402

DOCUMENT = (ROOT / "docs" / "reference" / "licences.md").read_text("utf-8")


def test_the_document_has_every_package_of_pyproject_with_its_licence() -> None:
    """And every licence of the packages that come with them is accepted: `rows` raises otherwise."""
    listed = re.findall(r"^\| \**([a-z0-9-]+)\** \| (.+) \| ([a-z, ]+) \|$", DOCUMENT, re.MULTILINE)
    lines = {name: (licence, extras) for name, licence, extras in listed}
    own = {row.name: (row.licence, ", ".join(row.extras)) for row in licences.rows() if row.direct}
    assert own.keys() >= {"numpy", "apache-tvm", "torch", "model-signing"}
    assert {name: lines.get(name) for name in own} == own


@pytest.mark.parametrize("field", [{}, {"License-Expression": "MIT AND LicenseRef-ours"}])
def test_a_dependency_of_an_unknown_licence_is_refused(field: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Message()
    for name, value in field.items():
        found[name] = value
    real = metadata.metadata
    monkeypatch.setattr(metadata, "metadata", lambda name: found if name == "numpy" else real(name))
    with pytest.raises(licences.UnknownLicence, match=r"extend tools/licences\.py: numpy: "):
        licences.rows()


@pytest.mark.parametrize(
    ("expression", "fine"),
    [
        ("MIT", True),
        ("GPL-3.0-only OR MIT", False),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT) AND (ISC)", True),
        ("", False),
    ],
)
def test_expressions(expression: str, fine: bool) -> None:
    assert licences.accepted(expression) == fine


def test_the_demo_needs_no_plots_and_no_science() -> None:
    assert licences.closure("example") >= {"torch", "pillow"}
    assert not licences.closure("example") & {"matplotlib", "scikit-image", "scipy"}


def test_make_installs_exact_versions() -> None:
    """A dependency without a line in constraints.txt floats: `make lock` adds it."""
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    assert "torch" in pinned
    assert (licences.closure("dev") | licences.closure("play")) - pinned == set()


@pytest.mark.parametrize(("given", "passed"), [((), []), (("TORCH_BACKEND=cpu",), ["--torch-backend", "cpu"])])
def test_make_demo_takes_the_build_of_torch_that_is_asked_for(
    given: tuple[str, ...], passed: list[str], tmp_path: Path
) -> None:
    command = ["make", "-n", "demo", f"VENV={tmp_path}", *given]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in printed.splitlines() if "-e" in line.split())
    words = shlex.split(line.replace(str(tmp_path), sys.prefix))
    assert (words[words.index("--torch-backend") :][:2] if "--torch-backend" in words else []) == passed
    installed = [*words[: words.index("--no-build-isolation-package")], "--dry-run", "--offline", "torch"]
    done = subprocess.run(installed, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # uv knows the option, and the pinned version satisfies it
