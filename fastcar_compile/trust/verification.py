"""Check a signature: the cryptography of its bundle, and that what was signed is this artifact's manifest and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcar_compile.artifact.digest import DIGEST_PREFIX
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.errors import SignatureError
from fastcar_compile.extras import needs
from fastcar_compile.trust.bundle import HINT, Bundle, read_bundle
from fastcar_compile.trust.report import SignatureReport
from fastcar_compile.trust.signers import CertificateSigner, KeylessSigner, KeySigner, Signer

if TYPE_CHECKING:
    from cryptography import x509

Configure = Callable[[Any], Any]
"""What chooses the verifier of a `model_signing.verifying.Config`."""


def check_signature(root: Path, digest: str, manifest: Manifest, signer: Signer) -> SignatureReport:
    """Return who signed, if it was the signer and if what was signed is this manifest.

    The artifact's other files are not read: their digests in the manifest are compared.

    Raises:
        SignatureError: see verify_signature. InputError: a key or certificate cannot be read.
        BackendError: the extra `sign` is not installed, or Sigstore cannot be reached.
    """
    bundle = read_bundle(root)
    if bundle.kind != signer.kind:
        what = f"the artifact's signature is of kind {bundle.kind}, and kind {signer.kind} is required"
        raise SignatureError(what, where=str(root / SIGNATURE), hint="require what it was signed with, or refuse it")
    digests = {MANIFEST: digest.removeprefix(DIGEST_PREFIX)}
    digests |= {name: entry.sha256 for name, entry in manifest.files.items()}
    with needs("sign"):
        match signer:
            case KeySigner():
                name = _verify_key(root, bundle, digests, signer)
            case CertificateSigner():
                name = _verify_certificate(root, bundle, digests, signer)
            case KeylessSigner():
                name = _verify_keyless(root, bundle, digests, signer)
    return SignatureReport(path=root, digest=digest, by=signer.kind, signer=name, files=len(digests))


def _verify_key(root: Path, bundle: Bundle, digests: dict[str, str], signer: KeySigner) -> str:
    from fastcar_compile.trust.keys import fingerprint, in_memory, public_key_pem

    pem = public_key_pem(signer.public_key)
    print_of_key, key = fingerprint(pem), bundle.verification_material.public_key
    if key is None or key.hint != print_of_key:
        signed = "no key" if key is None else f"the key sha256:{key.hint}"
        what = f"the artifact is signed with {signed}, not with the key required, sha256:{print_of_key}"
        raise SignatureError(
            what, where=str(root / SIGNATURE), hint="do not use the artifact, or give its signer's key"
        )
    with in_memory(pem) as (public_key,):
        _verify(root, bundle, digests, lambda config: config.use_elliptic_key_verifier(public_key=public_key))
    return f"sha256:{print_of_key}"


def _verify_certificate(root: Path, bundle: Bundle, digests: dict[str, str], signer: CertificateSigner) -> str:
    from fastcar_compile.trust.keys import certificates_of, in_memory, pem
    from fastcar_compile.trust.library import refusals

    roots = certificates_of(signer.roots)
    with refusals(root):
        leaf = _check_certificates(root, bundle, roots, signer)
    with in_memory(pem(roots)) as (trusted,):
        _verify(root, bundle, digests, lambda config: config.use_certificate_verifier(certificate_chain=[trusted]))
    return leaf.subject.rfc4514_string()


def _check_certificates(
    root: Path, bundle: Bundle, roots: list[x509.Certificate], signer: CertificateSigner
) -> x509.Certificate:
    """Check what the library does not: dates of today, the identity, and that the key is of the right kind."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    from fastcar_compile.trust.keys import names_of, validity_problem

    where = str(root / SIGNATURE)
    try:
        chain = [x509.load_der_x509_certificate(each) for each in bundle.certificates()]
        key = chain[0].public_key()
    except ValueError as error:
        raise SignatureError("the signature is damaged: a certificate of it is none", where=where, hint=HINT) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureError("the signing certificate has no elliptic curve key", where=where, hint=HINT)
    issuers = {each.issuer for each in chain}
    dated = [*chain, *(each for each in roots if each.subject in issuers)]
    problem = next(filter(None, map(validity_problem, dated)), None)
    if problem and not signer.accept_expired:
        hint = "have the artifact signed again; a policy may say `accept_expired = true`"
        raise SignatureError(problem, where=where, hint=hint)
    if signer.identity is not None and signer.identity not in (names := names_of(chain[0])):
        what = f"the artifact is signed by {', '.join(names) or 'nobody that is named'}, not by {signer.identity}"
        raise SignatureError(what, where=where, hint="do not use the artifact, or require the identity that signed it")
    return chain[0]


def _verify_keyless(root: Path, bundle: Bundle, digests: dict[str, str], signer: KeylessSigner) -> str:
    from fastcar_compile.trust.keyless import reach_sigstore

    identity, issuer = signer.identity, signer.issuer
    with reach_sigstore(signer.trust_config):
        _verify(
            root,
            bundle,
            digests,
            lambda config: config.use_sigstore_verifier(
                identity=identity, oidc_issuer=issuer, trust_config=signer.trust_config
            ),
        )
    return f"{identity} ({issuer})"


def _verify(root: Path, bundle: Bundle, digests: dict[str, str], configure: Configure) -> None:
    """Have the library verify the bundle, as it was checked and not as the file may be by now."""
    from fastcar_compile.trust.keys import in_memory
    from fastcar_compile.trust.library import quiet, refusals, verifying_config

    with in_memory(bundle.to_bytes()) as (file,), refusals(root), quiet():
        configure(verifying_config(digests)).verify(root, file)
