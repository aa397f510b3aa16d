"""`fastcar sign` and `fastcar verify-signature`, and the options of commands that require a signature."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.options import require_one
from fastcar_compile.cli.output import print_fields, print_json
from fastcar_compile.errors import InputError, UserError, count_text

if TYPE_CHECKING:
    from pydantic import SecretStr

    from fastcar_compile import Artifact
    from fastcar_compile.trust import SignatureReport, Signer

PASSPHRASE = "FASTCAR_KEY_PASSPHRASE"
"""Environment variable with the passphrase of a private key."""

DigestOption = Annotated[str | None, typer.Option("--digest", help="Accept only this digest: sha256:...")]
KeyOption = Annotated[
    Path | None, typer.Option("--public-key", help="Accept only what the holder of this key (PEM) signed.")
]
RereadOption = Annotated[
    bool, typer.Option("--reread/--no-reread", help="Read large files that did not change since they were checked.")
]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="Accept only what this policy (TOML) trusts.")]


def open_artifact(
    path: Path, digest: str | None, public_key: Path | None, policy: Path | None, reread: bool = True
) -> Artifact:
    """Return an artifact that meets everything that was asked for; see load."""
    import fastcar_compile as fc

    given = {"digest": digest, "require_signature": public_key, "policy": policy, "reread": None if reread else False}
    wanted: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return fc.load(str(path), **wanted)


@command
def sign_command(
    artifact: Annotated[Path, typer.Argument(help="Folder of the artifact.")],
    key: Annotated[Path | None, typer.Option(help="Private key, PEM (openssl ecparam -name prime256v1 ...).")] = None,
    certificate: Annotated[Path | None, typer.Option(help="The key's certificate, PEM.")] = None,
    chain: Annotated[
        list[Path] | None,
        typer.Option(metavar="<path>", help="Certificates between that one and the root, PEM; repeat."),
    ] = None,
    keyless: Annotated[
        bool, typer.Option("--keyless", help="Sign with an identity instead (Sigstore); needs a network.")
    ] = False,
    identity_token_file: Annotated[
        Path | None, typer.Option(help="OpenID Connect token; default: the CI service's, else a browser.")
    ] = None,
    issuer: Annotated[str | None, typer.Option(help="OpenID Connect issuer, a URL.")] = None,
    trust_config: Annotated[Path | None, typer.Option(help="Sigstore's client trust configuration, JSON.")] = None,
    passphrase_file: Annotated[
        Path | None, typer.Option(help=f"First line: the key's passphrase; default: {PASSPHRASE}.")
    ] = None,
    ask_passphrase: Annotated[bool, typer.Option("--ask-passphrase", help="Ask for it.")] = False,
    as_json: JsonOption = False,
) -> ExitCode:
    """Sign an artifact.

    The signature covers the manifest and every file, and lies in the artifact as signature.json.
    """
    import fastcar_compile as fc
    from fastcar_compile.trust import SigningCertificate, SigningIdentity, SigningKey

    if (key is None) != keyless:
        raise UserError("exactly one of --key and --keyless is needed", hint="for example --key signing.pem")
    if certificate is None and chain:
        raise UserError("--chain is given without --certificate", hint="give the key's own certificate too")
    if keyless and (certificate is not None or passphrase_file is not None or ask_passphrase):
        raise UserError("--keyless signs without a key", hint="leave out --certificate and the passphrase")
    if key is None:
        token = None if identity_token_file is None else _first_line(identity_token_file, "identity token")
        signer = SigningIdentity(token=token, issuer=issuer, trust_config=trust_config)
    else:
        if identity_token_file or issuer or trust_config:
            raise UserError("a key needs no identity", hint="leave out the options of --keyless")
        secret = _passphrase(passphrase_file, ask=ask_passphrase)
        signer = SigningKey(private_key=key, passphrase=secret)
        if certificate is not None:
            signer = SigningCertificate(
                private_key=key, certificate=certificate, chain=tuple(chain or ()), passphrase=secret
            )
    with stages(as_json, "sign") as show:
        show("checking the files")
        report = fc.sign(artifact, signer)
    _show(report, as_json)
    return ExitCode.OK


@command
def verify_signature_command(
    artifact: Annotated[Path, typer.Argument(help="Folder of the artifact.")],
    key: Annotated[Path | None, typer.Option(help="Public key of who must have signed, PEM.")] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option(metavar="<path>", help="Certificates of who vouches for the signer's, PEM; repeat."),
    ] = None,
    identity: Annotated[
        str | None, typer.Option(help="With --root or --issuer: e-mail address, DNS name or URI of the signer.")
    ] = None,
    issuer: Annotated[str | None, typer.Option(help="Keyless: OpenID Connect issuer of the identity, a URL.")] = None,
    trust_config: Annotated[Path | None, typer.Option(help="Sigstore's client trust configuration, JSON.")] = None,
    policy: PolicyOption = None,
    digest: DigestOption = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Check who signed an artifact, and every file of it.

    The exit code is 2 unless everything that is asked for holds. Nothing of the artifact is loaded.
    """
    import fastcar_compile as fc

    require_one([("--key", key is not None), ("--root", bool(root)), ("--issuer", issuer is not None)])
    signer: Path | Signer | None = key
    if root:
        signer = _certificate_signer(root, identity)
    elif issuer is not None:
        signer = _keyless_signer(identity, issuer, trust_config)
    elif identity is not None or trust_config is not None:
        raise UserError("an identity is given without who vouches for it", hint="give --root FILE, or --issuer URL")
    with stages(as_json, "verify-signature") as show:
        show("checking the files")
        report = fc.verify_signature(artifact, signer, policy=policy, digest=digest)
    _show(report, as_json)
    return ExitCode.OK


def _certificate_signer(roots: list[Path], identity: str | None) -> Signer:
    from fastcar_compile.trust import CertificateSigner

    return CertificateSigner(roots=tuple(roots), identity=identity or None)


def _keyless_signer(identity: str | None, issuer: str, trust_config: Path | None) -> Signer:
    from fastcar_compile.trust import KeylessSigner

    if not identity or not issuer:
        raise UserError("a keyless signature needs --identity and --issuer", hint="whose identity is trusted?")
    return KeylessSigner(identity=identity, issuer=issuer, trust_config=trust_config)


def _passphrase(file: Path | None, *, ask: bool) -> SecretStr | None:
    from pydantic import SecretStr

    require_one([("--passphrase-file", file is not None), ("--ask-passphrase", ask)])
    if file is not None:
        return _first_line(file, "passphrase")
    if ask:
        return SecretStr(typer.prompt("Passphrase of the key", hide_input=True, err=True))
    text = os.environ.get(PASSPHRASE)
    return None if text is None else SecretStr(text)


def _first_line(file: Path, what: str) -> SecretStr:
    from pydantic import SecretStr

    try:
        with file.open(encoding="utf-8") as stream:
            return SecretStr(stream.readline().rstrip("\n"))
    except (OSError, ValueError) as error:
        hint = "give a text file whose first line it is"
        raise InputError(f"the {what} cannot be read: {error}", where=str(file), hint=hint) from error


def _show(report: SignatureReport, as_json: bool) -> None:
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    fields = {"artifact": str(report.path), "digest": report.digest}
    fields |= {"trusted by": report.by, "signer": report.signer, "covers": count_text(report.files, "file")}
    print_fields(fields)
