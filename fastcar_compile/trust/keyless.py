"""What only signing without a key needs: Sigstore's services, or the file that stands for them."""

from __future__ import annotations

import base64
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from sigstore.errors import Error, VerificationError
from sigstore.models import ClientTrustConfig
from sigstore.oidc import IdentityError, IssuerError, detect_credential

from fastcar_compile.errors import BackendError, InputError
from fastcar_compile.trust.bundle import read_bundle
from fastcar_compile.trust.keys import names_of


@contextmanager
def reach_sigstore(trust_config: Path | None) -> Generator[None]:
    """Turn what fails on the way to Sigstore into errors of this package. A refused signature passes through.

    Raises:
        BackendError: Sigstore cannot be reached. InputError: the trust configuration or the identity cannot be used.
    """
    if trust_config is not None:
        _check(trust_config)
    try:
        yield
    except VerificationError:
        raise
    except IdentityError as error:
        hint = "sign where the CI service gives a token, or give one (--identity-token-file)"
        raise InputError(f"the identity cannot be used: {error}", where="Sigstore", hint=hint) from error
    except (Error, IssuerError, OSError) as error:
        hint = "check the network; without one, use a key or a certificate, or a trust configuration (--trust-config)"
        raise BackendError(f"Sigstore cannot be reached: {error}", where="Sigstore", hint=hint) from error


def _check(file: Path) -> None:
    hint = "give a client trust configuration of Sigstore, a JSON file"
    try:
        ClientTrustConfig.from_json(file.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"the trust configuration cannot be read: {error}", where=str(file), hint=hint) from error
    except (Error, ValueError, KeyError, TypeError) as error:
        raise InputError("the file is no trust configuration", where=str(file), hint=hint) from error


def require_identity(token: str | None) -> None:
    """Raise InputError where nobody can be asked for an identity."""
    if token is None and detect_credential() is None and not sys.stdin.isatty():
        what = "there is no identity to sign with: no token, no CI service that gives one, and no terminal to ask at"
        raise InputError(what, where="Sigstore", hint="give a token (--identity-token-file), or sign with a key")


def identity_of(root: Path) -> str:
    """Return who signed without a key, as the certificate in the bundle says."""
    certificate = read_bundle(root).verification_material.certificate
    if certificate is None:
        return "nobody that is named"
    return ", ".join(names_of(x509.load_der_x509_certificate(base64.b64decode(certificate.raw_bytes))))
