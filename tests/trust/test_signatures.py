"""Signing and verifying: what holds, and what is refused before anything else of the artifact is used."""

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner, Result

import fastcar_compile as fc
import fastcar_compile.artifact.trust
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from fastcar_compile.cli import app
from trust import damage
from trust.conftest import FILES, Keys, write_artifact, write_key


def digest_of(artifact: Path) -> str:
    return "sha256:" + hashlib.sha256((artifact / "manifest.json").read_bytes()).hexdigest()


def model_signing(*words: object) -> subprocess.CompletedProcess[str]:
    """The library's own command."""
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_signed_artifact_opens_with_the_key_and_not_with_another(artifact: Path, keys: Keys) -> None:
    before = artifact.stat().st_ino, (artifact / "manifest.json").read_bytes()
    signed = fc.sign(artifact, keys.private)
    assert (signed.by, signed.files, signed.digest) == ("key", len(FILES) + 1, digest_of(artifact))
    assert (artifact.stat().st_ino, (artifact / "manifest.json").read_bytes()) == before
    assert sorted(p.name for p in artifact.iterdir()) == ["drs", "host", "manifest.json", "signature.json", "weights"]
    assert [p.name for p in artifact.parent.iterdir()] == ["artifact"]
    opened = fc.load(artifact, require_signature=keys.public, digest=signed.digest)
    assert opened.digest == signed.digest
    assert fc.load(artifact).digest == signed.digest, "a signature nobody asks for is no hindrance"
    with pytest.raises(fc.SignatureError, match=r"signed with another key than the one required, sha256:"):
        fc.load(artifact, require_signature=keys.other_public)
    again = fc.sign(artifact, keys.other_private)
    assert again.signer != signed.signer
    assert fc.verify_signature(artifact, keys.other_public) == again


def test_the_library_itself_accepts_the_folder_and_the_other_way_round(artifact: Path, keys: Keys) -> None:
    fc.sign(artifact, keys.private)
    file = artifact / "signature.json"
    done = model_signing("verify", "key", "--public_key", keys.public, "--signature", file, artifact)
    assert (done.returncode, done.stdout) == (0, "Verification succeeded\n"), done.stderr
    file.unlink()
    done = model_signing("sign", "key", "--private_key", keys.private, "--signature", file, artifact)
    assert done.returncode == 0, done.stderr
    assert fc.verify_signature(artifact, keys.public).files == len(FILES) + 1


def test_no_file_is_read_twice(artifact: Path, keys: Keys) -> None:
    fc.sign(artifact, keys.private)
    names = {Path(name).name for name in (*FILES, "manifest.json", "signature.json")}
    opened: list[str] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | Path) and Path(arguments[0]).name in names:
            opened.append(Path(arguments[0]).name)

    sys.addaudithook(note)
    fc.load(artifact, require_signature=keys.public)
    assert sorted(opened) == sorted(names)
    opened.clear()
    fc.sign(artifact, keys.private)
    assert sorted(opened) == sorted(names - {"signature.json"})


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_a_private_key_with_a_passphrase(artifact: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    write_key(tmp_path / "locked.pem", b"open sesame", curve)
    with pytest.raises(fc.InputError, match="Password was not given but private key is encrypted"):
        fc.sign(artifact, tmp_path / "locked.pem")
    for wrong in ("guess", ""):
        with pytest.raises(fc.InputError, match=r"holds no private key that can be used"):
            fc.sign(artifact, tmp_path / "locked.pem", passphrase=wrong)
    assert not (artifact / "signature.json").exists()
    fc.sign(artifact, tmp_path / "locked.pem", passphrase="open sesame")
    fc.load(artifact, require_signature=tmp_path / "locked.pub")


def test_a_private_key_through_a_pipe(artifact: Path, keys: Keys) -> None:
    """As a shell's `<(command)` gives the key of a vault. A public key is read twice, and needs a file."""
    reader, writer = os.pipe()
    os.write(writer, keys.private.read_bytes())
    os.close(writer)
    fc.sign(artifact, f"/dev/fd/{reader}")
    os.close(reader)
    fc.load(artifact, require_signature=keys.public)
    with pytest.raises(fc.InputError, match="it is a device, not a plain file"):
        fc.sign(artifact, "/dev/zero")


def test_a_changed_file_is_refused_signed_or_not(artifact: Path, keys: Keys) -> None:
    fc.sign(artifact, keys.private)
    (artifact / "host/x/decode.so").write_bytes(b"\x7fELE")
    requirements: list[dict[str, Any]] = [{}, {"require_signature": keys.public}, {"digest": digest_of(artifact)}]
    for required in requirements:
        with pytest.raises(fc.ArtifactError, match=r"host/x/decode\.so: changed"):
            fc.load(artifact, **required)
    with pytest.raises(fc.ArtifactError, match=r"host/x/decode\.so: changed"):
        fc.sign(artifact, keys.private)


def test_the_signature_of_another_artifact_is_refused(artifact: Path, keys: Keys, tmp_path: Path) -> None:
    """Of one with other bytes, with a file less, and with one more."""
    fewer = dict(list(FILES.items())[:2])
    for number, files in enumerate((FILES | {"drs/table.bin": b"x"}, fewer, FILES | {"more": b"1"})):
        other = write_artifact(tmp_path / f"other{number}", files)
        fc.sign(other, keys.private)
        (artifact / "signature.json").write_bytes((other / "signature.json").read_bytes())
        with pytest.raises(fc.SignatureError, match="the signature is not of this artifact as it is") as error:
            fc.load(artifact, require_signature=keys.public)
        assert str(artifact / "signature.json") in str(error.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "the artifact has no signature"),
        (b"", "the signature is damaged"),
        (b"{}", "the signature is damaged: 'verificationMaterial'"),
        (b"[" * 100_000, "the signature is damaged"),
        (b"\xff", "the signature is damaged"),
        (b" " * (16 << 20) + b"{}", "the signature is not a plain file of at most 16777216 bytes"),
    ],
    ids=["none", "empty", "object", "deep", "no text", "long"],
)
def test_a_file_that_is_no_bundle(artifact: Path, keys: Keys, content: bytes | None, text: str) -> None:
    if content is not None:
        (artifact / "signature.json").write_bytes(content)
    with pytest.raises(fc.SignatureError, match=text):
        fc.load(artifact, require_signature=keys.public)


def test_a_signature_must_be_a_plain_file(artifact: Path, keys: Keys, tmp_path: Path) -> None:
    fc.sign(artifact, keys.private)
    file = artifact / "signature.json"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    requirements: list[dict[str, Any]] = [{}, {"require_signature": keys.public}]
    for required in requirements:
        with pytest.raises(fc.ArtifactError, match=r"signature\.json"):
            fc.load(artifact, **required)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(fc.ArtifactError, match="the signature is not a plain file"):
        fc.load(artifact, require_signature=keys.public)
    with pytest.raises(fc.ArtifactError, match=r"signature\.json"):
        fc.load(artifact)


def test_other_content_that_the_key_signed_is_no_signature_of_an_artifact(artifact: Path, keys: Keys) -> None:
    """A bundle whose cryptography holds and whose statement says something else, or nothing."""
    from model_signing._signing.sign_ec_key import Signer

    for statement in ({}, [], {"_type": "https://in-toto.io/Statement/v1"}, {"_type": 1, "predicateType": []}):
        payload: Any = SimpleNamespace(statement=SimpleNamespace(pb=_struct(statement)))
        bundle = Signer(keys.private).sign(payload)
        bundle.write(artifact / "signature.json")
        with pytest.raises(fc.SignatureError, match="the signature is damaged"):
            fc.load(artifact, require_signature=keys.public)


def _struct(value: object) -> object:
    from google.protobuf import json_format, struct_pb2

    return json_format.Parse(json.dumps(value), struct_pb2.Value())


# keys that cannot be used


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "the public key cannot be read"),
        (b"no key", "the file holds no public key that can be used"),
        (b"-" * (2 << 20), "no public key that can be used: it has more than 1048576 bytes"),
    ],
)
def test_public_keys_that_cannot_be_used(
    artifact: Path, keys: Keys, tmp_path: Path, content: bytes | None, text: str
) -> None:
    fc.sign(artifact, keys.private)
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(fc.InputError, match=text):
        fc.load(artifact, require_signature=tmp_path / "key")


# A damaged file of any kind is refused before a library is loaded, with a signature and with a pinned digest.


def test_flips_and_truncations_of_every_file_are_refused(artifact: Path, keys: Keys) -> None:
    signed = fc.sign(artifact, keys.private)
    required = {"digest": {"digest": signed.digest}, "signature": {"require_signature": keys.public}}
    attempts = damage.attempts_here(artifact, required)
    results = list(damage.outcomes(artifact, attempts, damage.Count(120, 40)))
    assert [r for r in results if r.loaded or not r.error] == []
    hit = {(r.case.name, r.case.required) for r in results}
    assert hit == {(n, kind) for n in (*FILES, MANIFEST) for kind in required} | {(SIGNATURE, "signature")}
    watch = damage.Watch()
    ctypes.CDLL("libm.so.6")
    assert (watch.loaded(), watch.loaded()) == (True, False), "the watch sees a library"


# `fastcar sign`, `verify-signature`, and the commands that require a signature.

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
        (("verify-signature", "A"), "nothing is required of the artifact"),
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
