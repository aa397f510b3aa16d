"""Trust in an artifact: who signed it, and which digest it must have.

An artifact holds native code. So what it may be is decided by a signature over its manifest and files, or by the pinned
digest of its manifest. This package needs neither torch nor the compiler; signatures need the extra `sign`.
"""

from fastcar_compile.trust.policy import Policy
from fastcar_compile.trust.report import SignatureReport
from fastcar_compile.trust.requirements import Requirements, verify_signature
from fastcar_compile.trust.signers import (
    CertificateSigner,
    KeylessSigner,
    KeySigner,
    Signer,
    SigningCertificate,
    SigningIdentity,
    SigningKey,
)
from fastcar_compile.trust.signing import sign

__all__ = [
    "CertificateSigner",
    "KeySigner",
    "KeylessSigner",
    "Policy",
    "Requirements",
    "SignatureReport",
    "Signer",
    "SigningCertificate",
    "SigningIdentity",
    "SigningKey",
    "sign",
    "verify_signature",
]
