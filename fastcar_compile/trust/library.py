"""The OpenSSF model-signing library, given digests that are known instead of files to read. Needs the extra `sign`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from model_signing import hashing, manifest, signing, verifying
from model_signing._hashing.hashing import Digest
from OpenSSL.crypto import X509StoreContextError
from sigstore.errors import VerificationError

from fastcar_compile.artifact.layout import SIGNATURE
from fastcar_compile.errors import SignatureError
from fastcar_compile.trust.bundle import HINT

SHOWN = 400
"""Characters of the library's message that an error shows."""

MALFORMED = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What the library raises on content that it does not expect, besides the errors that say what is wrong; the last ones
are of certificates, whose parts are parsed only when they are read."""

MISMATCH = "Signature mismatch: "
"""Beginning of the library's message on digests that differ."""

Digests = Mapping[str, str]
"""Name of each file of an artifact -> SHA-256 in hex, the manifest included."""


class KnownDigests(hashing.Config):
    """Hashes nothing: the artifact's manifest has the digests, and loading compares them with the files' bytes."""

    def __init__(self, digests: Digests) -> None:
        super().__init__()
        self._digests = digests

    def hash(self, model_path: Any, *, files_to_hash: object = None) -> manifest.Manifest:
        """Return the library's manifest of the artifact, as hashing all of its files would."""
        # The library's own `verify` leaves out what stands here: the signature cannot cover itself.
        arguments = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE]}
        serialization = manifest.SerializationType.from_args(arguments)
        items = [
            serialization.new_item(name, Digest("sha256", bytes.fromhex(digest)))
            for name, digest in self._digests.items()
        ]
        return manifest.Manifest(Path(model_path).resolve().name, items, serialization)


def signing_config(digests: Digests) -> Any:  # the library's own paths are typed in part
    """Return a `model_signing.signing.Config` that signs these digests."""
    return signing.Config().set_hashing_config(KnownDigests(digests))


def verifying_config(digests: Digests) -> Any:
    """Return a `model_signing.verifying.Config` that compares what was signed with these digests."""
    return verifying.Config().set_hashing_config(KnownDigests(digests))


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep stdout for results, and the library's own deprecation warnings to itself."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextlib.contextmanager
def refusals(root: Path) -> Generator[None]:
    """Turn the library's refusals of a bundle into errors of this package.

    Raises:
        SignatureError: what was refused, and why.
    """
    where, refuse = str(root / SIGNATURE), "do not use the artifact; get it from its signer again"
    try:
        yield
    except InvalidSignature as error:
        what = "the signature does not hold: its bytes were changed, or another key made it"
        raise SignatureError(what, where=where, hint=refuse) from error
    except X509StoreContextError as error:
        what = f"the signing certificate is not one that the roots vouch for: {_shown(error)}"
        raise SignatureError(
            what, where=where, hint="require the root that issued it, or refuse the artifact"
        ) from error
    except VerificationError as error:
        raise SignatureError(f"the signature does not hold: {_shown(error)}", where=where, hint=refuse) from error
    except MALFORMED as error:
        text = _shown(error)
        if text.startswith(MISMATCH):
            what = f"the signature is not of this artifact as it is: {text.removeprefix(MISMATCH)}"
            raise SignatureError(what, where=where, hint=refuse) from error
        raise SignatureError(f"the signature is damaged: {text}", where=where, hint=HINT) from error


def _shown(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
