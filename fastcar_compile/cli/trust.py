"""`fastcar sign` and `fastcar verify-signature`, and the options of commands that require a signature."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fastcar_compile as fc
from fastcar_compile.cli.common import JsonOption, command, stages
from fastcar_compile.cli.options import ArtifactArgument, require_one
from fastcar_compile.cli.output import print_fields, print_result, print_text
from fastcar_compile.errors import InputError, UserError, count_text
from fastcar_compile.support import limits

if TYPE_CHECKING:
    from fastcar_compile.artifact.trust import SignatureReport

PASSPHRASE = "FASTCAR_KEY_PASSPHRASE"
"""Environment variable with the passphrase of a private key."""

DigestOption = Annotated[str | None, typer.Option("--digest", help="Accept only this digest: sha256:...")]
KeyOption = Annotated[
    Path | None, typer.Option("--public-key", help="Accept only what the holder of this key (PEM) signed.")
]
RereadOption = Annotated[
    bool, typer.Option("--reread/--no-reread", help="Read large files that did not change since they were checked.")
]


@command
def sign_command(
    artifact: ArtifactArgument,
    key: Path | None = None,
    passphrase_file: Path | None = None,
    ask_passphrase: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Sign an artifact.

    The signature covers the manifest and every file, and lies in the artifact as signature.json.

    Args:
        key: Private key, PEM (openssl ecparam -name prime256v1 ...).
        passphrase_file: First line: the key's passphrase; default: FASTCAR_KEY_PASSPHRASE.
        ask_passphrase: Ask for it.
    """
    if key is None:
        raise UserError("no private key is given", hint="for example --key signing.pem")
    secret = _passphrase(passphrase_file, ask=ask_passphrase)
    with stages(as_json, "sign", "checking the files"):
        report = fc.sign(artifact, key, passphrase=secret)
    print_result(as_json, report.model_dump(mode="json"), lambda: _show(report))


@command
def verify_signature_command(
    artifact: ArtifactArgument,
    key: Path | None = None,
    digest: DigestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check who signed an artifact, and every file of it.

    The exit code is 2 unless everything that is asked for holds. Nothing of the artifact is loaded.

    Args:
        key: Public key of who must have signed, PEM.
    """
    with stages(as_json, "verify-signature", "checking the files"):
        report = fc.verify_signature(artifact, key, digest=digest)
    print_result(as_json, report.model_dump(mode="json"), lambda: _show(report))


def _passphrase(file: Path | None, *, ask: bool) -> str | None:
    """Return the key's passphrase; None: nobody gave one."""
    require_one({"--passphrase-file": file, "--ask-passphrase": ask})
    if file is not None:
        try:
            with file.open(encoding="utf-8") as stream:
                return stream.readline(limits.KEY_BYTES).rstrip("\n")
        except (OSError, ValueError) as error:
            hint = "give a text file whose first line is the passphrase"
            raise InputError(f"the passphrase cannot be read: {error}", where=str(file), hint=hint) from error
    if ask:
        return typer.prompt("Passphrase of the key", hide_input=True, err=True)
    return os.environ.get(PASSPHRASE)


def _show(report: SignatureReport) -> None:
    print_text(f"digest  {report.digest}\n")
    signed = {"trusted by": report.by, "signer": report.signer, "covers": count_text(report.files, "file")}
    print_fields({"artifact": str(report.path)} | signed)
