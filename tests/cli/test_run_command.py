"""`fastcar run`."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from fastcar_compile.cli.run import SHOWN
from fastcar_compile.ir.tensor_files import save_tensors
from fastcar_compile.runtime.backends import BACKENDS

from .conftest import VOCAB, FakeArtifact, Fastcar, refused


def test_greedy(fastcar: Fastcar, fake: FakeArtifact) -> None:
    result = fastcar("run", "x", "--prompt", "3,4", "--num-tokens", "9", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert data["tokens"] == [list(range(5, 14))] * 2
    assert (data["rows"], data["num_tokens"], data["forwards"], data["backend"]) == (2, 9, 8, "cpu")
    assert data["per_layer"] == [0.5, 0.0, 0.0]
    assert data["replay_ratio"] == pytest.approx(1 / 6)
    assert data["tokens_per_second"] > 0
    assert fake.sessions[0].thresholds is None


@pytest.mark.usefixtures("fake")
def test_text_form(fastcar: Fastcar) -> None:
    text = fastcar("run", "x", "--prompt", "3", "--num-tokens", "9").stdout
    decoded, seconds, *rest = text.splitlines()
    assert re.fullmatch(r"decoded +2 x 9 tokens on cpu, [0-9.]+ tokens/s", decoded)
    assert re.fullmatch(r"time +prompt [0-9.]+ s, decode [0-9.]+ s", seconds)
    tokens = "4 5 6 7 8 9 10 11 12"
    assert rest == ["replay     16.67% of all MLPs", "per layer  50.00%, 0.00%, 0.00%", "", tokens, tokens]
    for number, why in ((5, ": the first frame, of 4 tokens, has none before it to replay"), (6, "")):
        shown = fastcar("run", "x", "--prompt", "3", "--num-tokens", number).stdout
        assert re.search(rf"^replay +[0-9.]+% of all MLPs{why}$", shown, re.MULTILINE)


def test_help_names_every_backend(fastcar: Fastcar) -> None:
    text = fastcar("run", "--help").stdout
    assert [name for name in BACKENDS.names() if name not in text] == []


@pytest.mark.usefixtures("fake")
def test_one_token_has_no_speed(fastcar: Fastcar) -> None:
    data = json.loads(fastcar("run", "x", "--prompt", "3", "--num-tokens", "1", "--json").stdout)
    assert (data["tokens"], data["tokens_per_second"]) == ([[4], [4]], None)


@pytest.mark.usefixtures("fake")
def test_sampling_is_seeded(fastcar: Fastcar) -> None:
    words = ("run", "x", "--prompt", "3", "--num-tokens", "20", "--temperature", "2", "--json")
    first, again, other = (json.loads(fastcar(*words, "--seed", seed).stdout)["tokens"] for seed in (1, 1, 2))
    assert first == again != other
    assert max(max(row) for row in first) < VOCAB


@pytest.mark.usefixtures("fake")
def test_guidance_pairs_the_rows(fastcar: Fastcar) -> None:
    """The fake next token is the last one plus one. Guidance above 1 follows the prompt, guidance below 0 leaves it."""
    words = ("run", "x", "--prompt", "3", "--negative-prompt", "7", "--num-tokens", "3", "--json", "--guidance")
    assert json.loads(fastcar(*words, "2").stdout)["tokens"] == [[4, 5, 6]] * 2
    assert json.loads(fastcar(*words, "-2").stdout)["tokens"] == [[8, 9, 10]] * 2


def test_threshold_reaches_the_session(fastcar: Fastcar, fake: FakeArtifact) -> None:
    fastcar("run", "x", "--prompt", "3", "--num-tokens", "2", "--threshold", "1,none,-inf")
    fastcar("run", "x", "--prompt", "3", "--num-tokens", "2", "--threshold", "-inf")
    assert [session.thresholds for session in fake.sessions] == [[1.0, None, -math.inf], -math.inf]


@pytest.mark.usefixtures("fake")
def test_long_rows_are_cut_for_a_person_only(fastcar: Fastcar) -> None:
    words = ("run", "x", "--prompt", "3", "--num-tokens")
    shown = fastcar(*words, "800").stdout.split("\n\n")[1:]
    row = " ".join(str((4 + i) % VOCAB) for i in range(SHOWN)) + " …"
    assert shown == [
        f"{row}\n{row}",
        f"the first {SHOWN} of each row; --output FILE.npy writes all, and --json prints all\n",
    ]
    assert [len(row) for row in json.loads(fastcar(*words, "800", "--json").stdout)["tokens"]] == [800, 800]
    assert "…" not in fastcar(*words, SHOWN).stdout


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", ["tokens.npy", "tokens.safetensors"])
def test_prompt_file_and_output(fastcar: Fastcar, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    ids = np.array([[1, 2], [7, 8]], np.int32)
    if path.suffix == ".npy":
        np.save(path, ids)
    else:
        save_tensors(path, {"tokens": ids, "other": np.zeros(1)})
    out = tmp_path / "out.npy"
    result = fastcar("run", "x", "--prompt-file", path, "--num-tokens", "2", "--output", out)
    assert f"output     {out}" in result.stdout
    assert np.load(out).tolist() == [[3, 4], [9, 10]]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(3, np.float32), "the prompt file holds float32 [3], expected integers [P] or [B, P]"),
        (np.zeros((3, 2), np.int64), "the prompt has 3 rows, the artifact decodes 2"),
    ],
)
def test_bad_prompt_file(fastcar: Fastcar, tmp_path: Path, array: np.ndarray, text: str) -> None:
    np.save(tmp_path / "p.npy", array)
    refused(fastcar("run", "x", "--prompt-file", tmp_path / "p.npy"), text)
