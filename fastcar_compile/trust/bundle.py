"""signature.json: an OpenSSF model-signing bundle, read once and checked in form before its cryptography is.

https://github.com/sigstore/protobuf-specs (bundle), https://github.com/secure-systems-lab/dsse (envelope).
"""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

from fastcar_compile.artifact.layout import SIGNATURE
from fastcar_compile.errors import SignatureError
from fastcar_compile.limits import SIGNATURE_BYTES

HINT = "copy the artifact again, or have it signed again"


def _canonical_base64(text: str) -> str:
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("no canonical base64")
    return text


Base64 = Annotated[str, AfterValidator(_canonical_base64)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class _PublicKey(_Part):
    hint: str


class _Certificate(_Part):
    raw_bytes: Base64


class _Chain(_Part):
    certificates: tuple[_Certificate, ...] = Field(min_length=1, max_length=16)


class _Material(_Part):
    public_key: _PublicKey | None = None
    x509_certificate_chain: _Chain | None = None
    certificate: _Certificate | None = None
    tlog_entries: tuple[JsonValue, ...] = ()
    timestamp_verification_data: JsonValue = None


class _Signature(_Part):
    sig: Base64
    keyid: str = ""


class _Envelope(_Part):
    payload: Base64
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: tuple[_Signature, ...] = Field(min_length=1, max_length=1)


class Bundle(_Part):
    """A bundle whose form is right. Nothing of it can be believed yet."""

    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope

    @property
    def kind(self) -> Literal["key", "certificate", "keyless", "unknown"]:
        """What signed it, by its verification material."""
        material = self.verification_material
        if material.certificate is not None:
            return "keyless"
        if material.x509_certificate_chain is not None:
            return "certificate"
        return "unknown" if material.public_key is None else "key"

    def certificates(self) -> list[bytes]:
        """Return the signing certificate and those behind it, DER."""
        chain = self.verification_material.x509_certificate_chain
        return [] if chain is None else [base64.b64decode(each.raw_bytes) for each in chain.certificates]

    def to_bytes(self) -> bytes:
        """Return the bundle as JSON: exactly what was checked, whatever the file says besides."""
        return self.model_dump_json(by_alias=True, exclude_none=True).encode()


def read_bundle(root: Path) -> Bundle:
    """Return the bundle of an artifact.

    Raises:
        SignatureError: there is none, or it is damaged.
    """
    file = root / SIGNATURE
    try:
        return Bundle.model_validate_json(_content(file))
    except FileNotFoundError as error:
        hint = "sign it with `fastcar sign`, or ask for no signature"
        raise SignatureError("the artifact has no signature", where=str(file), hint=hint) from error
    except OSError as error:
        raise SignatureError(f"the signature cannot be read: {error.strerror}", where=str(file), hint=HINT) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        text = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise SignatureError(f"the signature is damaged: {text}", where=str(file), hint=HINT) from error


def _content(file: Path) -> bytes:
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise SignatureError("the signature is no plain file", where=str(file), hint=HINT)
        data = stream.read(SIGNATURE_BYTES + 1)
    if len(data) > SIGNATURE_BYTES:
        raise SignatureError(f"the signature has more than {SIGNATURE_BYTES} bytes", where=str(file), hint=HINT)
    return data
