"""Keys and certificates in PEM, read and checked. Needs the extra `sign`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr

from fastcar_compile.errors import InputError
from fastcar_compile.limits import KEY_BYTES

CURVES = ("secp256r1", "secp384r1", "secp521r1")
MAKE_KEY = "make one with `openssl ecparam -name prime256v1 -genkey -noout -out signing.pem`"
MAKE_PUBLIC = "write it with `openssl ec -in signing.pem -pubout -out signing.pub`"


def public_key_pem(file: Path) -> bytes:
    """Return the public key of a PEM file, in its canonical form.

    Raises:
        InputError: no file, no public key, or one of another kind than ECDSA on the curves above.
    """
    try:
        key = serialization.load_pem_public_key(_read(file, "public key", MAKE_PUBLIC))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError("the file holds no public key in PEM", where=str(file), hint=MAKE_PUBLIC) from error
    _check_curve(key, file)
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(public_key: bytes) -> str:
    """Return the SHA-256 of a public key's canonical PEM, as the bundle names the key."""
    return sha256(public_key).hexdigest()


def private_key_pem(file: Path, passphrase: SecretStr | None) -> bytes:
    """Return the private key of a PEM file, decrypted.

    Raises:
        InputError: no file, no private key, a wrong or missing passphrase, or a key of another kind.
    """
    data = _read(file, "private key", MAKE_KEY)
    secret = None if passphrase is None else passphrase.get_secret_value().encode()
    try:
        key = serialization.load_pem_private_key(data, secret)
    except TypeError as error:  # a passphrase that is missing, or one of a key without
        hint = "give the passphrase of the key, and none for a key without"
        raise InputError(f"the private key cannot be read: {error}", where=str(file), hint=hint) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        hint = MAKE_KEY if secret is None else "check the passphrase"
        raise InputError("the file holds no private key that can be read", where=str(file), hint=hint) from error
    _check_curve(key, file)
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def public_pem_of(private_key: bytes) -> bytes:
    """Return the public half of a private key, both in PEM."""
    key = serialization.load_pem_private_key(private_key, None).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def check_signing_certificate(certificate: x509.Certificate, private_key: bytes, file: Path) -> None:
    """Check that a certificate is of this key, valid today, and made for signatures.

    Raises:
        InputError: it is not.
    """
    problem = validity_problem(certificate)
    key = certificate.public_key()
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    if key.public_bytes(*form) != public_pem_of(private_key):
        problem = "the certificate is of another key"
    elif not _may_sign(certificate):
        problem = "the certificate is not made for signatures: its key usage is no digital signature"
    if problem:
        raise InputError(problem, where=str(file), hint="give the key's own certificate, valid today, for code signing")


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature
    except (x509.ExtensionNotFound, ValueError):
        return False


def _check_curve(key: object, file: Path) -> None:
    if not isinstance(key, ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey) or key.curve.name not in CURVES:
        what = f"the key is of another kind; elliptic curve keys on {', '.join(CURVES)} can be used"
        raise InputError(what, where=str(file), hint=MAKE_KEY)


def certificates_of(files: Iterable[Path]) -> list[x509.Certificate]:
    """Return the certificates of PEM files.

    Raises:
        InputError: no file, or no certificates in one.
    """
    found: list[x509.Certificate] = []
    for file in files:
        data = _read(file, "certificate", "give a file in PEM (-----BEGIN CERTIFICATE-----)")
        try:
            found += x509.load_pem_x509_certificates(data)
        except ValueError as error:
            hint = "give a file in PEM (-----BEGIN CERTIFICATE-----)"
            raise InputError("the file holds no certificate", where=str(file), hint=hint) from error
    return found


def pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """Return certificates one after the other in PEM."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return whom a certificate is for: its common names, e-mail addresses, DNS names and URIs."""
    found = [str(each.value) for each in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    try:
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return found
    for kind in (x509.RFC822Name, x509.DNSName, x509.UniformResourceIdentifier):
        found += others.get_values_for_type(kind)
    return found


def validity_problem(certificate: x509.Certificate) -> str | None:
    """Return why a certificate does not hold today, or None."""
    now, name = datetime.now(UTC), certificate.subject.rfc4514_string()
    if now > certificate.not_valid_after_utc:
        return f"the certificate {name} expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if now < certificate.not_valid_before_utc:
        return f"the certificate {name} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} on"
    return None


@contextmanager
def in_memory(*contents: bytes) -> Generator[list[Path]]:
    """Yield paths of files that lie in memory alone, for a library that takes paths."""
    with ExitStack() as stack:
        paths: list[Path] = []
        for content in contents:
            handle = os.memfd_create("fastcar", os.MFD_CLOEXEC)
            stack.callback(os.close, handle)
            with os.fdopen(os.dup(handle), "wb") as stream:
                stream.write(content)
            paths.append(Path(f"/proc/self/fd/{handle}"))
        yield paths


def _read(file: Path, what: str, hint: str) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(KEY_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"the {what} cannot be read: {error}", where=str(file), hint=hint) from error
    if len(data) > KEY_BYTES:
        raise InputError(f"the {what} has more than {KEY_BYTES} bytes", where=str(file), hint=hint)
    return data
