"""The release pipeline: the script on the shipped decoder, where it stops, and the CI files beside it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from trust.conftest import write_key
from typer.testing import CliRunner

from fastcar_compile.cli import app

FOLDER = Path(__file__).parents[1] / "examples" / "pipeline"
MODEL = FOLDER.parent / "moving_shapes" / "model"
STEPS = ("dry_run", "build", "verify", "sign", "verify_signature", "run")
PASSPHRASE = "open sesame"


def release(
    folder: Path, *options: str, passphrase: str = PASSPHRASE, model: Path = MODEL
) -> subprocess.CompletedProcess[str]:
    """`release.sh` with the key of `folder`, into `folder`/out."""
    fastcar = folder / "fastcar"
    fastcar.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fastcar_compile "$@"\n')
    fastcar.chmod(0o755)
    environment = os.environ | {"FASTCAR": str(fastcar), "FASTCAR_KEY_PASSPHRASE": passphrase, "VERIFY_TOKENS": "4"}
    words = [model, folder / "out", folder / "key.pem", folder / "key.pub", "--target", "cpu", *options]
    command = [str(FOLDER / "release.sh"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.thorough  # what it calls is tested by itself; half a minute of new processes
def test_the_script_releases_the_shipped_decoder(tmp_path: Path) -> None:
    write_key(tmp_path / "key.pem", PASSPHRASE.encode())
    done = release(tmp_path, "--max-seq-len", "288")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.endswith(": done")] == [f"{name}: done" for name in STEPS]
    reports: dict[str, Any] = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in STEPS}
    digest = reports["build"]["digest"]
    assert done.stdout == f"{digest}\n"
    assert reports["sign"] == reports["verify_signature"]
    assert (reports["sign"]["digest"], reports["sign"]["by"]) == (digest, "key")
    assert reports["verify"]["ok"]
    assert len(reports["run"]["tokens"][0]) == 16
    assert PASSPHRASE not in done.stdout + done.stderr + json.dumps(reports)


def scripts(document: Any) -> list[str]:
    """Every shell line of a CI file."""
    if isinstance(document, dict):
        job: dict[str, Any] = document
        return [line for value in job.values() for line in scripts(value)]
    if isinstance(document, list):
        return [line for value in document for line in scripts(value)]
    return [line.strip() for line in str(document).splitlines()]


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_the_ci_files_run_the_script(name: str) -> None:
    document = yaml.safe_load((FOLDER / name).read_text())
    (call,) = (line for line in scripts(document) if line.startswith("examples/pipeline/release.sh"))
    words = shlex.split(call)
    assert len(words) > 5
    help_text = CliRunner().invoke(app, ["compile", "--help-experts"]).stdout
    assert [word for word in words if word.startswith("--") and word not in help_text] == []
    extras = re.findall(r"\.\[([\w,]+)\]", (FOLDER / name).read_text())
    assert extras == ["compile,sign"]
