"""signature.json: as it is, and with its payload signed by the key that is required."""

import json
from base64 import b64decode, b64encode
from hashlib import sha256

from fastcar_compile.artifact.layout import SIGNATURE
from fastcar_compile.artifact.trust import Requirements
from fastcar_compile.errors import SignatureError
from fuzz import signers
from fuzz.expect import accepted, as_file, folder

_MANIFEST = signers.manifest()
_DIGEST = f"sha256:{sha256(_MANIFEST.to_bytes()).hexdigest()}"
_REQUIRED = Requirements(public_key=as_file("key.pub", signers.public_key()))


def run(data: bytes) -> bool:
    """Check the bundle against a key; then again with its payload signed by that key."""
    found = _check(data)
    try:
        bundle = json.loads(data)
        envelope = bundle["dsseEnvelope"]
        payload = b64decode(envelope["payload"])
        envelope["signatures"] = [{"sig": b64encode(signers.sign(payload)).decode(), "keyid": ""}]
        again = json.dumps(bundle).encode()
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return found
    return found | _check(again)


def _check(data: bytes) -> bool:
    as_file(SIGNATURE, data)
    before = len(_REQUIRED.reports)
    accepted(SignatureError, lambda: _REQUIRED.check_manifest(folder(), _DIGEST, _MANIFEST))
    return len(_REQUIRED.reports) > before
