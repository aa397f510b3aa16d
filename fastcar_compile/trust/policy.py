"""A policy file: which artifacts are trusted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import AliasChoices, Field, model_validator

from fastcar_compile.artifact.digest import DIGEST_PATTERN
from fastcar_compile.errors import InputError
from fastcar_compile.limits import TOML_BYTES
from fastcar_compile.trust.signers import CertificateSigner, KeylessSigner, KeySigner, Named, Signer


class Policy(Named):
    """What an artifact needs to be trusted: one of the digests, or a signature of one of the signers.

    Args:
        digests: of manifests, `sha256:` and 64 hex digits.
        signers: any of `fastcar_compile.trust`; a file writes [[signer]].
    """

    digests: tuple[Annotated[str, Field(pattern=DIGEST_PATTERN)], ...] = ()
    signers: tuple[Signer, ...] = Field(default=(), validation_alias=AliasChoices("signers", "signer"))

    @model_validator(mode="after")
    def _names_somebody(self) -> Self:
        if not self.digests and not self.signers:
            raise ValueError("a policy needs `digests` or a [[signer]]; an empty one would trust nobody")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a TOML file. Paths in it are relative to its folder.

        Raises:
            InputError: missing or malformed.
        """
        file = Path(path)
        hint = "docs/tutorial/signing.md shows a policy"
        try:
            with file.open("rb") as stream:
                data = stream.read(TOML_BYTES + 1)
            if len(data) > TOML_BYTES:
                raise InputError(f"the policy has more than {TOML_BYTES} bytes", where=str(file), hint=hint)
            fields = tomllib.loads(data.decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"the policy cannot be read: {error}", where=str(file), hint=hint) from error
        try:
            found = cls(**fields)
        except InputError as error:
            raise InputError(f"the policy is malformed: {error.what}", where=str(file), hint=hint) from error
        return found.model_copy(update={"signers": tuple(_in_folder(each, file.parent) for each in found.signers)})


def _in_folder(signer: Signer, folder: Path) -> Signer:
    match signer:
        case KeySigner():
            return signer.model_copy(update={"public_key": folder / signer.public_key})
        case CertificateSigner():
            return signer.model_copy(update={"roots": tuple(folder / root for root in signer.roots)})
        case KeylessSigner():
            config = signer.trust_config
            return signer.model_copy(update={"trust_config": None if config is None else folder / config})
