"""Sign an artifact: one bundle over its manifest and every file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcar_compile.artifact.atomic import sync
from fastcar_compile.artifact.claim import Claim
from fastcar_compile.artifact.digest import DIGEST_PREFIX
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import ArtifactError, InputError
from fastcar_compile.extras import needs
from fastcar_compile.trust.report import SignatureReport
from fastcar_compile.trust.signers import SigningCertificate, SigningIdentity, SigningKey
from fastcar_compile.values import path_of

Configure = Callable[[Any], Any]
"""What chooses the signer of a `model_signing.signing.Config`."""


def sign(path: str | Path, signer: str | Path | SigningKey | SigningCertificate | SigningIdentity) -> SignatureReport:
    """Sign an artifact and keep the signature in its folder, in place of an earlier one.

    Every file is checked against the manifest first, and read once.

    Args:
        signer: the private key's file; or a key with its passphrase, a key with its certificate, or an identity.

    Raises:
        ArtifactError: the artifact is damaged, or the signature cannot be written.
        InputError: the key or certificate cannot be used. BackendError: no extra `sign`, or no way to Sigstore.
    """
    root = path_of("the artifact", path)
    stored = StoredArtifact(root)
    digests = {MANIFEST: stored.digest.removeprefix(DIGEST_PREFIX)}
    digests |= {name: entry.sha256 for name, entry in stored.manifest.files.items()}
    if isinstance(signer, str | Path):
        signer = SigningKey(private_key=Path(signer))
    with needs("sign"):
        match signer:
            case SigningKey():
                kind, name = "key", _sign_with_key(root, digests, signer)
            case SigningCertificate():
                kind, name = "certificate", _sign_with_certificate(root, digests, signer)
            case SigningIdentity():
                kind, name = "keyless", _sign_with_identity(root, digests, signer)
            case _:
                hint = "give the path of a private key, or a SigningKey, SigningCertificate or SigningIdentity"
                raise InputError(f"a {type(signer).__name__} cannot sign", where="signer", hint=hint)
    return SignatureReport(path=root, digest=stored.digest, by=kind, signer=name, files=len(digests))


def _sign_with_key(root: Path, digests: dict[str, str], signer: SigningKey) -> str:
    from fastcar_compile.trust.keys import fingerprint, in_memory, private_key_pem, public_pem_of

    key = private_key_pem(signer.private_key, signer.passphrase)
    with in_memory(key) as (private_key,):
        _write(root, digests, lambda config: config.use_elliptic_key_signer(private_key=private_key))
    return f"sha256:{fingerprint(public_pem_of(key))}"


def _sign_with_certificate(root: Path, digests: dict[str, str], signer: SigningCertificate) -> str:
    from fastcar_compile.trust.keys import (
        certificates_of,
        check_signing_certificate,
        in_memory,
        pem,
        private_key_pem,
    )

    key = private_key_pem(signer.private_key, signer.passphrase)
    leaf, *rest = certificates_of([signer.certificate])
    check_signing_certificate(leaf, key, signer.certificate)
    chain = [*rest, *certificates_of(signer.chain)] or [leaf]  # the library refuses an empty one
    with in_memory(key, pem([leaf]), pem(chain)) as (private_key, certificate, others):
        _write(
            root,
            digests,
            lambda config: config.use_certificate_signer(
                private_key=private_key, signing_certificate=certificate, certificate_chain=[others]
            ),
        )
    return leaf.subject.rfc4514_string()


def _sign_with_identity(root: Path, digests: dict[str, str], signer: SigningIdentity) -> str:
    from fastcar_compile.trust.keyless import identity_of, reach_sigstore, require_identity

    token = None if signer.token is None else signer.token.get_secret_value()
    with reach_sigstore(signer.trust_config):
        require_identity(token)
        _write(
            root,
            digests,
            lambda config: config.use_sigstore_signer(
                use_ambient_credentials=True,
                identity_token=token,
                oidc_issuer=signer.issuer,
                trust_config=signer.trust_config,
            ),
        )
    return identity_of(root)


def _write(root: Path, digests: dict[str, str], configure: Configure) -> None:
    """Write the bundle beside the artifact, then put it in place in one step."""
    from fastcar_compile.trust.keys import in_memory
    from fastcar_compile.trust.library import quiet, signing_config

    with in_memory(b"") as (made,), quiet():
        configure(signing_config(digests)).sign(root, made)
        data = made.read_bytes()
    folder = root.absolute()
    with Claim(folder) as claim:
        try:
            with claim.manifest.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            claim.manifest.chmod(0o644)
            os.replace(claim.manifest, folder / SIGNATURE)
            sync(folder)
        except OSError as error:
            raise ArtifactError(f"the signature cannot be written: {error}", where=str(root)) from error
