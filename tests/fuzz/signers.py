"""The signer of the fuzzed signatures: a key that anybody can compute, and its certificate."""

from __future__ import annotations

import json
from base64 import b64encode
from datetime import UTC, datetime
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from manifests import sections

from fastcar_compile.artifact.files import FileEntry
from fastcar_compile.artifact.manifest import Manifest

_ROOT, _KEY = (ec.derive_private_key(number, ec.SECP256R1()) for number in (2026, 2027))
_TYPE = "application/vnd.in-toto+json"


def manifest() -> Manifest:
    """What is signed."""
    files = {name: FileEntry(sha256="ab" * 32, size=1) for name in ("drs/table.bin", "host/a.so")}
    return Manifest(producer={"python": "3.11"}, files=files, **dict(sections()))


def public_key() -> bytes:
    """The signer's public key in PEM."""
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _KEY.public_key().public_bytes(*form)


def root() -> bytes:
    """The certificate that vouches for the signer's, in PEM."""
    return _certificate("root", _ROOT, authority=True).public_bytes(serialization.Encoding.PEM)


def sign(payload: bytes) -> bytes:
    """The signature of an envelope with this payload."""
    message = f"DSSEv1 {len(_TYPE)} {_TYPE} {len(payload)} ".encode() + payload
    return _KEY.sign(message, ec.ECDSA(hashes.SHA256()))


def bundles() -> dict[str, bytes]:
    """A signature by the key, and one by the certificate, of the manifest and its files."""
    made = manifest()
    digests = {"manifest.json": sha256(made.to_bytes()).hexdigest()}
    digests |= {name: entry.sha256 for name, entry in made.files.items()}
    leaf = _certificate("signer", _KEY, authority=False).public_bytes(serialization.Encoding.DER)
    raw = {"rawBytes": b64encode(leaf).decode()}
    return {
        "key": _bundle(digests, {"publicKey": {"hint": sha256(public_key()).hexdigest()}}),
        "certificate": _bundle(digests, {"x509CertificateChain": {"certificates": [raw, raw]}}),
    }


def _bundle(digests: dict[str, str], material: dict[str, object]) -> bytes:
    resources = [{"name": name, "algorithm": "sha256", "digest": digests[name]} for name in sorted(digests)]
    whole = sha256(b"".join(bytes.fromhex(each["digest"]) for each in resources)).hexdigest()
    ignored = [".git", ".gitattributes", ".github", ".gitignore", "signature.json"]
    serialization_ = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": ignored}
    payload = json.dumps(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": "artifact", "digest": {"sha256": whole}}],
            "predicateType": "https://model_signing/signature/v1.0",
            "predicate": {"serialization": serialization_, "resources": resources},
        }
    ).encode()
    signature = {"sig": b64encode(sign(payload)).decode(), "keyid": ""}
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {**material, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": b64encode(payload).decode(),
            "payloadType": _TYPE,
            "signatures": [signature],
        },
    }
    return json.dumps(bundle).encode()


def _certificate(name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    usage = dict.fromkeys(others.split(), False)
    usage |= {"digital_signature": not authority, "key_cert_sign": authority, "crl_sign": authority}
    subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, "root"))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(1 if authority else 2)
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )
    return builder.sign(_ROOT, hashes.SHA256())
