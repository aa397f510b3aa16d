"""Policies, pinned digests, and what would end them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fastcar_compile as fc
from fastcar_compile.artifact.manifest import sealed
from fastcar_compile.trust import CertificateSigner, KeylessSigner, KeySigner, Policy, SigningCertificate, SigningKey
from trust.conftest import Authority, Keys
from trust.test_signatures import digest_of, signed_with


@pytest.mark.parametrize("text", ["sha256:00", "00" * 32, "SHA256:" + "0" * 64, "sha256:" + "G" * 64, ""])
def test_what_is_no_digest(artifact: Path, text: str) -> None:
    with pytest.raises(fc.InputError, match="is no digest of an artifact"):
        fc.load(artifact, digest=text)


def test_another_digest_is_refused_before_the_manifest_is_parsed(artifact: Path) -> None:
    pinned = digest_of(artifact)
    assert fc.load(artifact, digest=pinned).digest == pinned
    (artifact / "manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(fc.SignatureError, match=r"the artifact's digest is sha256:\w+, not the pinned sha256:"):
        fc.load(artifact, digest=pinned)


def write_policy(folder: Path, text: str) -> Path:
    (folder / "policy.toml").write_text(text)
    return folder / "policy.toml"


def test_a_policy_accepts_any_of_its_signers_and_digests(
    artifact: Path, keys: Keys, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "release.pub").write_bytes(keys.public.read_bytes())
    (tmp_path / "root.crt").write_bytes(authority.root.read_bytes())
    text = '[[signer]]\nkind = "key"\npublic_key = "release.pub"\n'
    text += '[[signer]]\nkind = "certificate"\nroots = ["root.crt"]\nidentity = "release@example.com"\n'
    policy = write_policy(tmp_path, text)
    fc.sign(artifact, keys.private)
    assert fc.verify_signature(artifact, policy=policy).by == "key"
    signed_with(artifact, authority, "release")
    assert fc.verify_signature(artifact, policy=policy).by == "certificate"
    signed_with(artifact, authority, "stranger", email="stranger@example.com")
    with pytest.raises(fc.SignatureError) as error:
        fc.load(artifact, policy=Policy.load(policy))
    assert "the policy does not accept the artifact:" in str(error.value)
    assert "kind certificate, and kind key is required" in str(error.value)
    assert "signed by stranger, stranger@example.com, not by release@example.com" in str(error.value)
    (artifact / "signature.json").unlink()
    policy = write_policy(tmp_path, f'digests = ["{digest_of(artifact)}"]\n' + text)
    assert fc.verify_signature(artifact, policy=policy).by == "digest"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty one would trust nobody"),
        ("digests = []", "an empty one would trust nobody"),
        ('digests = ["sha256:0"]', r"digests\.0: String should match"),
        ("[[signer]]\n", r"signer\.0: Unable to extract tag"),
        ('[[signer]]\nkind = "key"\n', r"signer\.0\.key\.public_key: Field required"),
        (
            '[[signer]]\nkind = "certificate"\nroots = []\n',
            r"signer\.0\.certificate\.roots: Tuple",
        ),
        ('[[signer]]\nkind = "keyless"\nidentity = "a"\n', r"signer\.0\.keyless\.issuer: Field required"),
        ("self = 1\n", "self: Extra inputs are not permitted"),
        ("x = 1\n", "x: Extra inputs are not permitted"),
        ("x = ", "the policy cannot be read: Invalid value"),
        ("\x00", "the policy cannot be read"),
        ("x = " + "[" * 5000, "the policy cannot be read"),
        ("# " + "x" * (1 << 20), "the policy has more than 1048576 bytes"),
    ],
)
def test_policies_that_cannot_be_used(artifact: Path, tmp_path: Path, text: str, message: str) -> None:
    policy = write_policy(tmp_path, text)
    with pytest.raises(fc.InputError, match=message) as error:
        fc.load(artifact, policy=policy)
    assert str(policy) in str(error.value)


@pytest.mark.parametrize("value", [None, 3, object(), [], {}])
def test_values_that_are_no_path_of_a_key(value: Any) -> None:
    for make in (
        lambda: KeySigner(public_key=value),
        lambda: CertificateSigner(roots=(value,)),
        lambda: CertificateSigner(roots=value),
        lambda: KeylessSigner(identity=value, issuer="x"),
        lambda: SigningKey(private_key=value),
        lambda: SigningCertificate(private_key="k", certificate=value),  # pyright: ignore[reportArgumentType]
        lambda: Policy(signers=(value,)),
        lambda: Policy(digests=(value,)),
    ):
        with pytest.raises(fc.InputError, match=" is not valid: "):
            make()


def test_verifying_nothing_is_refused(artifact: Path) -> None:
    with pytest.raises(fc.InputError, match="nothing is required of the artifact"):
        fc.verify_signature(artifact)


def test_storing_thresholds_ends_no_trust_unasked(artifact: Path, keys: Keys) -> None:
    unsigned = fc.load(artifact)
    before = unsigned.digest
    unsigned.store_thresholds(None)
    assert unsigned.digest == digest_of(artifact) == before, "the same manifest"
    pinned = fc.load(artifact, digest=before)
    with pytest.raises(fc.SignatureError, match="trusted by its digest or a policy"):
        pinned.store_thresholds(None)
    fc.sign(artifact, keys.private)
    with pytest.raises(fc.SignatureError, match="the artifact is signed, and other thresholds"):
        fc.load(artifact).store_thresholds(None)
    assert (artifact / "signature.json").exists()
    fc.load(artifact).store_thresholds(None, drop_signature=True)
    assert not (artifact / "signature.json").exists()
    with pytest.raises(fc.SignatureError, match="the artifact has no signature"):
        fc.load(artifact, require_signature=keys.public)


def test_a_manifest_cannot_list_its_signature(artifact: Path) -> None:
    manifest = (artifact / "manifest.json").read_text()
    (artifact / "manifest.json").write_bytes(sealed(json.loads(manifest.replace("drs/table.bin", "signature.json"))))
    with pytest.raises(fc.ArtifactError, match=r"'signature\.json' is reserved"):
        fc.load(artifact)
