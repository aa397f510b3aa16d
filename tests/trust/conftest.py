"""Keys and certificates of a release, and an artifact that was never compiled."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
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
