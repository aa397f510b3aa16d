"""Trust in an artifact: which digest it must have, and whose key must have signed it.

An artifact holds native code, so whoever makes one decides what a session runs. The digest of `manifest.json` names an
artifact with all its files. A signature is a bundle of OpenSSF model signing over the manifest and every file, beside
the manifest as `signature.json`. Signing and verifying need the extra `sign`; a pinned digest needs nothing.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from fastcar_compile.artifact.claim import claimed, put
from fastcar_compile.artifact.digest import DIGEST_PATTERN, DIGEST_PREFIX
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import ArtifactError, InputError, SignatureError
from fastcar_compile.support import limits
from fastcar_compile.support.packages import needs, require
from fastcar_compile.support.values import file_bytes, path_of, refuse_pipe, shown

REFUSE = "do not use the artifact: get the one that is trusted, or trust this one after you have checked it"
MAKE_KEY = "make one with `openssl ecparam -name prime256v1 -genkey -noout -out signing.pem`"
MAKE_PUBLIC = "write it with `openssl ec -in signing.pem -pubout -out signing.pub`"


class SignatureReport(BaseModel):
    """The signer or the pinned digest that vouches for an artifact.

    Args:
        path: folder of the artifact. digest: digest of its manifest.
        by: "digest" where the digest alone was pinned.
        signer: fingerprint of the key, `sha256:` and 64 hex digits; of a pinned digest: the digest.
        files: files that the signature covers, the manifest included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    digest: str
    by: Literal["key", "digest"]
    signer: str
    files: int


@dataclass(frozen=True)
class Requirements:
    """The requirements of a caller on an artifact that is to be opened. Every given requirement has to hold.

    Args:
        digest: digest of the manifest. public_key: PEM file with the public key of the signer.
        reports: one report per requirement that was met, in this order; filled while an artifact is opened.
    """

    digest: str | None = None
    public_key: Path | None = None
    reports: list[SignatureReport] = field(default_factory=list[SignatureReport])

    @classmethod
    def of(cls, *, digest: str | None = None, require_signature: str | Path | None = None) -> Self:
        """Return the requirements that a caller gives.

        Raises:
            InputError: the digest has another form, or the public key is not a path.
        """
        given: Any = digest
        if given is not None and not (isinstance(given, str) and re.fullmatch(DIGEST_PATTERN, given)):
            hint = "give what `fastcar compile` printed: sha256: and 64 hexadecimal digits"
            raise InputError(f"{shown(digest)} is not a digest of an artifact", where="digest", hint=hint)
        key = None if require_signature is None else path_of("require_signature", require_signature)
        if key is not None:
            require("sign", "model_signing")
        return cls(digest, key)

    def __bool__(self) -> bool:
        return self.digest is not None or self.public_key is not None

    def check_digest(self, root: Path, digest: str) -> None:
        """Raise SignatureError unless the digest is the pinned digest."""
        if self.digest is not None and digest != self.digest:
            what = f"the artifact's digest is {digest}, not the pinned {self.digest}"
            raise SignatureError(what, where=str(root), hint=REFUSE)

    def check_manifest(self, root: Path, digest: str, manifest: Manifest) -> None:
        """Raise SignatureError unless the required key signed this manifest and the hashes that it lists.

        The artifact's other files are not read: opening it compares their bytes with the manifest.
        """
        files = len(manifest.files) + 1
        report = SignatureReport(path=root, digest=digest, by="digest", signer=digest, files=files)
        if self.digest is not None:
            self.reports.append(report)
        if self.public_key is not None:
            with needs("sign"):
                signer = _verify(root, _digests(digest, manifest), self.public_key)
            self.reports.append(report.model_copy(update={"by": "key", "signer": signer}))


def verify_signature(
    path: str | Path, public_key: str | Path | None = None, *, digest: str | None = None
) -> SignatureReport:
    """Check an artifact's files and its signature, and return who signed it.

    Args:
        public_key: PEM file with the public key of the signer. digest: the only digest to accept. Every given argument
            must hold.

    Returns:
        The signer; where only a digest is required, the digest.

    Raises:
        SignatureError: the signature is missing, is damaged, or is of another signer or of another artifact.
        ArtifactError: the artifact is damaged.
        InputError: the key cannot be read, or no requirement is given. BackendError: the extra `sign` is not installed.
    """
    path = path_of("the artifact", path)
    wanted = Requirements.of(require_signature=public_key, digest=digest)
    if not wanted:
        hint = "give a public key, or a digest, or both"
        raise InputError("nothing is required of the artifact", where=str(path), hint=hint)
    StoredArtifact(path, wanted)
    return wanted.reports[-1]


def sign(path: str | Path, private_key: str | Path, *, passphrase: str | None = None) -> SignatureReport:
    """Sign an artifact and keep the signature in its folder, in place of an earlier one.

    Every file is checked against the manifest first, and read once.

    Args:
        private_key: PEM file of an elliptic curve key (P-256, P-384 or P-521). passphrase: of an encrypted key.

    Raises:
        ArtifactError: the artifact is damaged, or the signature cannot be written.
        InputError: the key cannot be used. BackendError: the extra `sign` is not installed.
    """
    root, key = path_of("the artifact", path), path_of("the private key", private_key)
    require("sign", "model_signing")
    stored = StoredArtifact(root)
    digests = _digests(stored.digest, stored.manifest)
    with needs("sign"):
        from model_signing import signing

        config: Any = signing.Config().set_hashing_config(_known(digests))
        secret: Any = passphrase.encode() if passphrase else None  # the library hands it to cryptography, as bytes
        with _usable(key, "private key", MAKE_KEY):
            config.use_elliptic_key_signer(private_key=key, password=secret)
        bundle = _written(root, lambda file: config.sign(root, file))
    signer = f"sha256:{bundle['verificationMaterial']['publicKey']['hint']}"
    return SignatureReport(path=root, digest=stored.digest, by="key", signer=signer, files=len(digests))


def _digests(digest: str, manifest: Manifest) -> dict[str, str]:
    """Return the hashes that a signature covers: file -> SHA-256 in hex, the manifest included."""
    return {MANIFEST: digest.removeprefix(DIGEST_PREFIX)} | {n: entry.sha256 for n, entry in manifest.files.items()}


def _verify(root: Path, digests: Mapping[str, str], public_key: Path) -> str:
    """Return the fingerprint of the key if it signed these digests."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
    from model_signing import verifying

    config: Any = verifying.Config().set_hashing_config(_known(digests))
    with _usable(public_key, "public key", MAKE_PUBLIC):
        refuse_pipe(public_key)  # it is read twice
        config.use_elliptic_key_verifier(public_key=public_key)
        key = load_pem_public_key(public_key.read_bytes())
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        fingerprint = f"sha256:{sha256(pem).hexdigest()}"  # as the bundle names the key
    file = root / SIGNATURE
    if not os.path.lexists(file):
        hint = "sign it with `fastcar sign`, or ask for no signature"
        raise SignatureError("the artifact has no signature", where=str(file), hint=hint)
    # A link or a pipe would be followed, or waited for; a huge file would be read whole.
    if file.is_symlink() or not file.is_file() or file.stat().st_size > limits.SIGNATURE_BYTES:
        what = f"the signature is not a plain file of at most {limits.SIGNATURE_BYTES} bytes"
        raise SignatureError(what, where=str(file), hint=REFUSE)
    with _refusals(file, fingerprint), contextlib.redirect_stdout(sys.stderr):  # it warns there of older bundles
        config.verify(root, file)
    return fingerprint


def _known(digests: Mapping[str, str]) -> Any:
    """Return a hashing configuration that hashes nothing: the artifact's manifest has the digests."""
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class Known(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: object = None) -> manifest.Manifest:
            # The library's own `verify` leaves out what stands here: the signature cannot cover itself.
            arguments = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE]}
            form = manifest.SerializationType.from_args(arguments)
            items = [form.new_item(name, Digest("sha256", bytes.fromhex(value))) for name, value in digests.items()]
            return manifest.Manifest(Path(model_path).resolve().name, items, form)

    return Known()


@contextlib.contextmanager
def _usable(key: Path, what: str, hint: str) -> Generator[None]:
    """Raise an InputError in place of the libraries' errors about a key file."""
    try:
        if not key.is_fifo():  # a private key may come through a pipe, once
            file_bytes(key, limits.KEY_BYTES)  # the libraries read it too, and whole
        yield
    except OSError as error:
        raise InputError(f"the {what} cannot be read: {error.strerror or error}", where=str(key), hint=hint) from error
    except Exception as error:  # a wrong passphrase, another curve, no PEM: cryptography has a type for each
        raise InputError(f"the file holds no {what} that can be used: {error}", where=str(key), hint=hint) from error


@contextlib.contextmanager
def _refusals(file: Path, fingerprint: str) -> Generator[None]:
    """Raise a SignatureError in place of a refusal of the library.

    A bundle is anybody's bytes and the library parses it without a schema, so any exception is a refusal.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        yield
    except InvalidSignature as error:
        what = f"the signature does not hold: its bytes were changed, or another key than {fingerprint} made it"
        raise SignatureError(what, where=str(file), hint=REFUSE) from error
    except Exception as error:
        # The bundle's own words are in it, and JSON has texts that no encoding has.
        text = (str(error) or type(error).__name__)[:400].encode("utf-8", "backslashreplace").decode("utf-8")
        if text.startswith("Key mismatch"):
            what = f"the artifact is signed with another key than the one required, {fingerprint}"
        elif text.startswith("Signature mismatch: "):
            what = f"the signature is not of this artifact as it is: {text.removeprefix('Signature mismatch: ')}"
        else:
            what = f"the signature is damaged: {text}"
        raise SignatureError(what, where=str(file), hint=REFUSE) from error


def _written(root: Path, make: Callable[[Path], None]) -> Any:
    """Write the bundle beside the artifact, put it in place atomically, and return its JSON."""
    folder = root.absolute()
    with claimed(folder) as building:
        try:
            made = building / "bundle"
            make(made)
            data = made.read_bytes()
            put(made, folder / SIGNATURE, 0o644)
            return json.loads(data)
        except OSError as error:
            raise ArtifactError(f"the signature cannot be written: {error}", where=str(root)) from error
