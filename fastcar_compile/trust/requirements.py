"""What a caller requires of an artifact that is to be opened."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fastcar_compile.artifact.digest import DIGEST_PATTERN
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import InputError, SignatureError
from fastcar_compile.trust.policy import Policy
from fastcar_compile.trust.report import SignatureReport
from fastcar_compile.trust.signers import SIGNERS, KeySigner, Signer
from fastcar_compile.trust.verification import check_signature
from fastcar_compile.values import path_of, shown

REFUSE = "do not use the artifact: get the one that is trusted, or trust this one after you have checked it"


@dataclass(frozen=True)
class Requirements:
    """Everything that is given has to hold.

    Args:
        digest: of the manifest. signer: who must have signed. policy: must be met.
        reports: one per requirement that was met, in this order; filled while an artifact is opened.
    """

    digest: str | None = None
    signer: Signer | None = None
    policy: Policy | None = None
    reports: list[SignatureReport] = field(default_factory=list[SignatureReport])

    @classmethod
    def of(
        cls,
        *,
        digest: str | None = None,
        require_signature: str | Path | Signer | None = None,
        policy: str | Path | Policy | None = None,
    ) -> Self:
        """Return the requirements that a caller gives.

        Raises:
            InputError: no digest, a policy that cannot be read, or something else than a key or a signer.
        """
        if digest is not None and not _is_digest(digest):
            hint = "give what `fastcar compile` printed: sha256: and 64 hexadecimal digits"
            raise InputError(f"{shown(digest)} is no digest of an artifact", where="digest", hint=hint)
        signer = None if require_signature is None else _signer(require_signature)
        return cls(digest, signer, None if policy is None else _policy(policy))

    def __bool__(self) -> bool:
        return self.digest is not None or self.signer is not None or self.policy is not None

    def check_digest(self, root: Path, digest: str) -> None:
        """Raise SignatureError unless the digest is the pinned one."""
        if self.digest is None:
            return
        if digest != self.digest:
            what = f"the artifact's digest is {digest}, not the pinned {self.digest}"
            raise SignatureError(what, where=str(root), hint=REFUSE)

    def check_manifest(self, root: Path, digest: str, manifest: Manifest) -> None:
        """Raise SignatureError unless signer and policy accept the artifact."""
        if self.digest is not None:
            self.reports.append(_pinned(root, digest, manifest))
        if self.signer is not None:
            self.reports.append(check_signature(root, digest, manifest, self.signer))
        if self.policy is not None:
            self.reports.append(_meet(self.policy, root, digest, manifest))


def verify_signature(
    path: str | Path,
    signer: str | Path | Signer | None = None,
    *,
    policy: str | Path | Policy | None = None,
    digest: str | None = None,
) -> SignatureReport:
    """Check an artifact's files and its signature, and return who signed it.

    Args:
        signer: who must have signed; a path: of a public key in PEM.
        policy: a policy or its file. digest: the only one to accept. All that are given must hold.

    Returns:
        Who signed; where only a digest is what is met, that.

    Raises:
        SignatureError: no signature, a damaged one, one of somebody else, or one of another artifact.
        ArtifactError: the artifact is damaged.
        InputError: the key, certificate or policy cannot be read, or nothing is required.
    """
    path = path_of("the artifact", path)
    wanted = Requirements.of(require_signature=signer, policy=policy, digest=digest)
    if not wanted:
        hint = "give a public key, a certificate's root, an identity, a policy or a digest"
        raise InputError("nothing is required of the artifact", where=str(path), hint=hint)
    StoredArtifact(path, wanted)
    return wanted.reports[-1]


def _pinned(root: Path, digest: str, manifest: Manifest) -> SignatureReport:
    return SignatureReport(path=root, digest=digest, by="digest", signer=digest, files=len(manifest.files) + 1)


def _meet(policy: Policy, root: Path, digest: str, manifest: Manifest) -> SignatureReport:
    """Return what of the policy is met."""
    if digest in policy.digests:
        return _pinned(root, digest, manifest)
    refused: list[str] = []
    for signer in policy.signers:
        try:
            return check_signature(root, digest, manifest, signer)
        except SignatureError as error:
            refused.append(error.what)
    reasons = [f"its digest {digest} is none of the policy's {len(policy.digests)}"] if policy.digests else []
    text = "".join(f"\n    {reason}" for reason in [*reasons, *refused])
    raise SignatureError(f"the policy does not accept the artifact:{text}", where=str(root), hint=REFUSE)


def _is_digest(given: object) -> bool:
    return isinstance(given, str) and re.fullmatch(DIGEST_PATTERN, given) is not None


def _policy(given: object) -> Policy:
    if isinstance(given, str | Path):
        return Policy.load(given)
    if isinstance(given, Policy):
        return given
    hint = "give a Policy, or the path of its file"
    raise InputError(f"a policy cannot be a {type(given).__name__}", where="policy", hint=hint)


def _signer(given: object) -> Signer:
    if isinstance(given, str | Path):
        return KeySigner(public_key=Path(given))
    if isinstance(given, SIGNERS):
        return given
    raise InputError(
        f"a signature cannot be required of a {type(given).__name__}",
        where="require_signature",
        hint="give the path of a public key, or a KeySigner, CertificateSigner or KeylessSigner",
    )
