"""A policy file: which artifacts are trusted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from fastcar_compile.artifact.digest import DIGEST_PATTERN
from fastcar_compile.errors import InputError, describe_validation
from fastcar_compile.limits import TOML_BYTES
from fastcar_compile.trust.signers import CertificateSigner, KeylessSigner, KeySigner, Signer


class Policy(BaseModel):
    """What an artifact needs to be trusted: one of the digests, or a signature of one of the signers.

    Args:
        digests: of manifests, `sha256:` and 64 hex digits. signers: see `fastcar_compile.trust`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digests: tuple[Annotated[str, Field(pattern=DIGEST_PATTERN)], ...] = ()
    signers: tuple[Signer, ...] = Field(default=(), alias="signer")

    @field_validator("signers")
    @classmethod
    def _beside_the_policy(cls, signers: tuple[Signer, ...], info: ValidationInfo) -> tuple[Signer, ...]:
        folder = cast("dict[str, Path]", info.context or {}).get("folder")
        return signers if folder is None else tuple(_in_folder(signer, folder) for signer in signers)

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
            return cls.model_validate(fields, context={"folder": file.parent})
        except ValidationError as error:
            text = "; ".join(describe_validation(error))
            raise InputError(f"the policy is malformed: {text}", where=str(file), hint=hint) from error


def _in_folder(signer: Signer, folder: Path) -> Signer:
    match signer:
        case KeySigner():
            return signer.model_copy(update={"public_key": folder / signer.public_key})
        case CertificateSigner():
            return signer.model_copy(update={"roots": tuple(folder / root for root in signer.roots)})
        case KeylessSigner():
            config = signer.trust_config
            return signer.model_copy(update={"trust_config": None if config is None else folder / config})
