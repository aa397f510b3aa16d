"""Who may have signed an artifact, and who signs one: keys, certificates, identities."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from fastcar_compile.checked import checked


@checked(hint="correct what is named; docs/tutorial/signing.md has examples")
class Named(BaseModel):
    """Frozen, without unknown fields. A refused value raises InputError, which names every field at fault."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class KeySigner(Named):
    """The holder of the private key to `public_key`, a PEM file of an elliptic curve key."""

    kind: Literal["key"] = "key"
    public_key: Path


class CertificateSigner(Named):
    """The holder of a certificate that one of the roots issued.

    Args:
        roots: PEM files. The system's own roots are never used: they vouch for web sites of anybody.
        identity: an e-mail address, DNS name or URI of the certificate, or its common name; None: any of the roots'.
        accept_expired: trust a certificate that was valid when it was issued and has expired since.
    """

    kind: Literal["certificate"] = "certificate"
    roots: tuple[Path, ...] = Field(min_length=1)
    identity: str | None = Field(default=None, min_length=1)
    accept_expired: bool = False


class KeylessSigner(Named):
    """Who proved an identity to an OpenID Connect issuer when signing (Sigstore).

    Args:
        identity: for example an e-mail address, or the URI of a CI workflow. issuer: who vouches for it, a URL.
        trust_config: Sigstore's client trust configuration, a JSON file; None: the public instance's, over the network.
    """

    kind: Literal["keyless"] = "keyless"
    identity: str = Field(min_length=1)
    issuer: str = Field(min_length=1)
    trust_config: Path | None = None


Signer = Annotated[KeySigner | CertificateSigner | KeylessSigner, Field(discriminator="kind")]
"""Who must have signed."""

SIGNERS = (KeySigner, CertificateSigner, KeylessSigner)


class SigningKey(Named):
    """A private elliptic curve key in PEM."""

    private_key: Path
    passphrase: SecretStr | None = None


class SigningCertificate(Named):
    """A private key, its certificate, and the certificates between that one and the root."""

    private_key: Path
    certificate: Path
    chain: tuple[Path, ...] = ()
    passphrase: SecretStr | None = None


class SigningIdentity(Named):
    """An identity of Sigstore: the token given, else the CI service's own, else one that the user gets in a browser.

    Args:
        token: OpenID Connect identity token. issuer: None: the one of the trust configuration.
        trust_config: as of KeylessSigner.
    """

    token: SecretStr | None = None
    issuer: str | None = None
    trust_config: Path | None = None
