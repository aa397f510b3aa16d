"""The decoder's sizes, as an artifact's manifest states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastcar_compile.artifact.store import Manifest
from fastcar_compile.errors import ArtifactError


@dataclass(frozen=True)
class Sizes:
    """Rows, tokens and widths of a compiled decoder; vocab_size is None for a headless one."""

    batch_size: int
    max_seq_len: int
    tokens_per_frame: int
    vocab_size: int | None
    hidden_size: int | None
    takes_embeddings: bool


def decoder_sizes(manifest: Manifest) -> Sizes:
    """Return the sizes in the manifest's section "decoder".

    Raises:
        ArtifactError: a size that every artifact has is missing.
    """
    fields: Mapping[str, Any] = manifest.sections.get("decoder") or {}
    required = ("batch_size", "max_seq_len", "tokens_per_frame")
    missing = [name for name in required if not isinstance(fields.get(name), int)]
    if missing:
        raise ArtifactError(f"the manifest does not state {', '.join(missing)}", hint="compile the model again")
    return Sizes(
        batch_size=fields["batch_size"],
        max_seq_len=fields["max_seq_len"],
        tokens_per_frame=fields["tokens_per_frame"],
        vocab_size=fields.get("vocab_size"),
        hidden_size=fields.get("hidden_size"),
        takes_embeddings=bool(fields.get("takes_embeddings", False)),
    )
