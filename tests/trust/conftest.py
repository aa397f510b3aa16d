"""Keys and certificates of a release, and an artifact that was never compiled."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from manifests import sections

from fastcar_compile.artifact.writer import ArtifactWriter

FILES = {"weights/model.safetensors": b"weights" * 50, "host/x/decode.so": b"\x7fELF", "drs/table.bin": bytes(64)}


def write_artifact(path: Path, files: dict[str, bytes] = FILES) -> Path:
    """An artifact of these files."""
    with ArtifactWriter(path) as writer:
        for name, data in files.items():
            writer.write_bytes(name, data)
        writer.finish(sections())
    return path


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """An unsigned artifact."""
    return write_artifact(tmp_path / "artifact")


@dataclass(frozen=True)
class Keys:
    """A private key, its public half, and another pair."""

    private: Path
    public: Path
    other_private: Path
    other_public: Path


def write_key(
    path: Path, passphrase: bytes | None = None, curve: ec.EllipticCurve | None = None
) -> ec.EllipticCurvePrivateKey:
    """A new private key at `path`, its public half beside it as .pub."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*form))
    return key


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Two pairs."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("release", "other"):
        write_key(folder / f"{name}.pem")
    return Keys(*(folder / name for name in ("release.pem", "release.pub", "other.pem", "other.pub")))


@dataclass(frozen=True)
class Authority:
    """A root, an intermediate, and where their files are."""

    folder: Path
    root: Path
    intermediate: Path
    intermediate_key: ec.EllipticCurvePrivateKey
    name: x509.Name

    def issue(self, name: str, *, days: int = 30, email: str = "release@example.com") -> tuple[Path, Path]:
        """A new key and its certificate, which expires after (or, negative, expired before) so many days."""
        key = write_key(self.folder / f"{name}.pem")
        certificate = _certificate(
            name, key.public_key(), self.name, self.intermediate_key, days=days, authority=False, email=email
        )
        path = self.folder / f"{name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return self.folder / f"{name}.pem", path


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    days: int,
    authority: bool,
    email: str = "",
) -> x509.Certificate:
    end = datetime.now(UTC) + timedelta(days=days)
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    usage = dict.fromkeys(others.split(), False)
    usage |= {"digital_signature": not authority, "key_cert_sign": authority, "crl_sign": authority}
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=400 if authority else 60))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )
    if email:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.RFC822Name(email)]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def make_authority(folder: Path) -> Authority:
    """A new root and intermediate."""
    root_key, key = write_key(folder / "root.pem"), write_key(folder / "intermediate.pem")
    name = _name("intermediate")
    root = _certificate("root", root_key.public_key(), _name("root"), root_key, days=300, authority=True)
    between = _certificate("intermediate", key.public_key(), _name("root"), root_key, days=200, authority=True)
    for certificate, file in ((root, "root.crt"), (between, "intermediate.crt")):
        (folder / file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(folder, folder / "root.crt", folder / "intermediate.crt", key, name)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who vouches for the signer's certificate."""
    return make_authority(tmp_path_factory.mktemp("authority"))
