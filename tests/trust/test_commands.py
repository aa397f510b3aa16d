"""`fastcar sign`, `verify-signature`, and the commands that require a signature."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fastcar_compile.cli import app
from trust.conftest import FILES, Keys, write_key
from trust.test_signatures import digest_of

Fastcar = Callable[..., Result]


@pytest.fixture
def fastcar() -> Fastcar:
    """Runs `fastcar` with the given words, in this process."""
    return lambda *words, **options: CliRunner().invoke(app, [str(word) for word in words], **options)


def test_sign_and_verify(fastcar: Fastcar, artifact: Path, keys: Keys) -> None:
    done = fastcar("sign", artifact, "--key", keys.private)
    assert done.exit_code == 0, done.stderr
    fields = {line[:10].strip(): line[12:] for line in done.stdout.splitlines()}
    assert done.stdout.startswith(f"digest  {digest_of(artifact)}\n")
    assert fields["covers"] == f"{len(FILES) + 1} files"
    verified = fastcar("verify-signature", artifact, "--key", keys.public)
    assert (verified.exit_code, verified.stdout) == (0, done.stdout)
    report = json.loads(fastcar("verify-signature", artifact, "--key", keys.public, "--json").stdout)
    assert set(report) == {"path", "digest", "by", "signer", "files"}
    refused = fastcar("verify-signature", artifact, "--key", keys.other_public, "--json")
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["type"], refused.stderr) == (2, "SignatureError", "")


def test_passphrases(fastcar: Fastcar, artifact: Path, tmp_path: Path) -> None:
    write_key(tmp_path / "key.pem", b"open sesame")
    (tmp_path / "secret").write_text("open sesame\nanything\n")
    for options, environment, typed, code in (
        ((), {}, None, 2),
        ((), {"FASTCAR_KEY_PASSPHRASE": "open sesame"}, None, 0),
        (("--passphrase-file", tmp_path / "secret"), {}, None, 0),
        (("--passphrase-file", tmp_path / "nothing"), {}, None, 2),
        (("--ask-passphrase",), {}, "open sesame\n", 0),
        (("--ask-passphrase",), {}, "guess\n", 2),
    ):
        words = ("sign", artifact, "--key", tmp_path / "key.pem", *options)
        done = fastcar(*words, env=environment, input=typed)
        assert done.exit_code == code, done.output
        assert "open sesame" not in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("sign", "A"), "no private key is given"),
        (("sign", "A", "--key", "k"), "the private key cannot be read"),
        (("verify-signature", "A"), "nothing is required of the artifact"),
        (("verify-signature", "A", "--digest", "d"), "'d' is not a digest of an artifact"),
        (("run", "A", "--prompt", "1", "--digest", "d"), "'d' is not a digest of an artifact"),
        (("run", "A", "--prompt", "1", "--public-key", "k"), "the public key cannot be read"),
        (("verify", "A", "--digest", f"sha256:{'0' * 64}"), "the artifact's digest is sha256:"),
    ],
)
def test_calls_that_are_refused(
    fastcar: Fastcar, artifact: Path, words: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact.parent)
    done = fastcar(*(artifact if word == "A" else word for word in words))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {text}"), done.stderr


def test_calibrate_stores_nothing_in_a_signed_artifact(fastcar: Fastcar, artifact: Path, keys: Keys) -> None:
    fastcar("sign", artifact, "--key", keys.private)
    before = digest_of(artifact)
    done = fastcar("calibrate", artifact, "--videos", artifact / "none.npy", "--target-replay", 0.5, "--store")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the artifact is signed, and thresholds stored in it would end that")
    assert (digest_of(artifact), (artifact / "signature.json").exists()) == (before, True)


def test_the_guide_names_options_that_exist(fastcar: Fastcar) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tutorial" / "signing.md").read_text()
    for command in ("sign", "verify-signature", "run"):
        known = set(re.findall(r"--[\w-]+", fastcar(command, "--help").stdout))
        used = {o for line in re.findall(rf"^fastcar {command} .*", text, re.M) for o in re.findall(r"--[\w-]+", line)}
        assert used
        assert used <= known
