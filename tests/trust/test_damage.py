"""A damaged file of any kind is refused before a library is loaded, with a signature and with a pinned digest."""

from pathlib import Path

import pytest
from conftest import fresh_process

import fastcar_compile as fc
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from trust import damage
from trust.conftest import FILES, Keys


def test_flips_and_truncations_of_every_file_are_refused(artifact: Path, keys: Keys) -> None:
    signed = fc.sign(artifact, keys.private)
    required = {"digest": {"digest": signed.digest}, "signature": {"require_signature": keys.public}}
    attempts = damage.attempts_here(artifact, required)
    results = list(damage.outcomes(artifact, attempts, damage.Count(120, 40)))
    assert [r for r in results if r.loaded or not r.error] == []
    hit = {(r.case.name, r.case.required) for r in results}
    assert hit == {(n, kind) for n in (*FILES, MANIFEST) for kind in required} | {(SIGNATURE, "signature")}


@pytest.mark.parametrize("code", ["ctypes.CDLL('libm.so.6')", "importlib.import_module('_bisect')", "None"])
def test_the_watch_sees_a_library(code: str) -> None:
    script = "import sys, ctypes, importlib\nfrom trust.damage import Watch\nsys.modules.pop('_bisect', None)\n"
    script += f"watch = Watch()\n{code}\nprint(watch.loaded(), watch.loaded())"
    assert fresh_process("-c", script).split() == [str(code != "None"), "False"]
