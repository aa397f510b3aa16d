"""The signer of the fuzzed signatures: a key that anybody can compute."""

import json
from base64 import b64encode
from hashlib import sha256

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from manifests import sections

from fastcar_compile.artifact.digest import FileEntry
from fastcar_compile.artifact.manifest import Manifest

_KEY = ec.derive_private_key(2027, ec.SECP256R1())
_TYPE = "application/vnd.in-toto+json"


def manifest() -> Manifest:
    """What is signed."""
    files = {name: FileEntry(sha256="ab" * 32, size=1) for name in ("drs/table.bin", "host/a.so")}
    return Manifest(producer={"python": "3.11"}, files=files, **dict(sections()))


def public_key() -> bytes:
    """The signer's public key in PEM."""
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _KEY.public_key().public_bytes(*form)


def sign(payload: bytes) -> bytes:
    """The signature of an envelope with this payload."""
    message = f"DSSEv1 {len(_TYPE)} {_TYPE} {len(payload)} ".encode() + payload
    return _KEY.sign(message, ec.ECDSA(hashes.SHA256()))


def bundles() -> dict[str, bytes]:
    """A signature by the key of the manifest and its files."""
    made = manifest()
    digests = {"manifest.json": sha256(made.to_bytes()).hexdigest()}
    digests |= {name: entry.sha256 for name, entry in made.files.items()}
    return {"key": _bundle(digests, {"publicKey": {"hint": sha256(public_key()).hexdigest()}})}


def _bundle(digests: dict[str, str], material: dict[str, object]) -> bytes:
    resources = [{"name": name, "algorithm": "sha256", "digest": digests[name]} for name in sorted(digests)]
    whole = sha256(b"".join(bytes.fromhex(each["digest"]) for each in resources)).hexdigest()
    ignored = [".git", ".gitattributes", ".github", ".gitignore", "signature.json"]
    serialization_ = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": ignored}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "artifact", "digest": {"sha256": whole}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"serialization": serialization_, "resources": resources},
    }
    payload = json.dumps(statement).encode()
    signature = {"sig": b64encode(sign(payload)).decode(), "keyid": ""}
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {**material, "tlogEntries": []},
        "dsseEnvelope": {"payload": b64encode(payload).decode(), "payloadType": _TYPE, "signatures": [signature]},
    }
    return json.dumps(bundle).encode()
