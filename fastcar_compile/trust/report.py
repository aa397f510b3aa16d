"""What is known of an artifact's signature after it was made or checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class SignatureReport(BaseModel):
    """Who vouches for an artifact.

    Args:
        path: the artifact. digest: of its manifest.
        by: "digest" where the digest alone was pinned.
        signer: fingerprint of the key, subject of the certificate, or identity; of a digest: the digest.
        files: files that the signature covers, the manifest included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    digest: str
    by: Literal["key", "certificate", "keyless", "digest"]
    signer: str
    files: int
