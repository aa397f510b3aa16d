"""`fastcar doctor`: what it finds on this machine, on one without tools, and with packages of other versions."""

import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import first_often

import fastcar_compile as fc
from fastcar_compile.report import environment
from fastcar_compile.report.environment import Check

from .conftest import Fastcar

GPU = environment._gpu


@pytest.fixture(autouse=True)
def no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that asks for an adapter takes most of the time of each call."""
    monkeypatch.setattr(environment, "_gpu", lambda: Check(name="gpu", severity="info", message="none", hint="none"))


def by_name() -> dict[str, Check]:
    return {check.name: check for check in fc.doctor()}


def test_packages_and_cpu_are_found() -> None:
    found = by_name()
    for name in ("python", "apache-tvm", "torch", "onnx", "onnxruntime", "cpu", "wgpu"):
        assert found[name].severity == "ok", found[name]
        assert not found[name].hint
    assert importlib.metadata.version("torch") in found["torch"].message


@pytest.mark.parametrize(
    ("code", "said", "found"),
    [
        (0, "DiscreteGPU Some Card", ("ok", "Some Card")),
        (0, "CPU llvmpipe", ("ok", "llvmpipe, a software adapter")),
        (1, "", ("info", "no adapter is found: backend webgpu cannot run here")),
    ],
)
def test_a_gpu(monkeypatch: pytest.MonkeyPatch, code: int, said: str, found: tuple[str, str]) -> None:
    monkeypatch.setattr(environment, "_ran", lambda *_: SimpleNamespace(returncode=code, stdout=f"{said}\n"))
    check = GPU()
    assert (check.severity, check.message) == found


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing on PATH, and no headers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AP_TYPES", str(tmp_path))


def test_a_machine_without_tools(without_tools: None, fastcar: Fastcar) -> None:
    result = fastcar("doctor", "--json")
    assert result.exit_code == 2
    found: dict[str, Any] = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    severities = {"g++": "error", "aarch64-linux-gnu-g++": "warning", "qemu-aarch64": "info", "vitis": "info"}
    for name, severity in (severities | {"ap_types headers": "warning"}).items():
        assert found[name]["severity"] == severity
        assert found[name]["hint"]
    assert "host programs of kv260, zcu102" in found["aarch64-linux-gnu-g++"]["message"]
    text = fastcar("doctor")
    assert text.exit_code == 2
    assert text.stdout.splitlines()[1].startswith("error")
    assert "1 error, 2 warning" in text.stdout


def test_a_device_is_said_to_be_one(without_tools: None, monkeypatch: pytest.MonkeyPatch, fastcar: Fastcar) -> None:
    """An installation without extras: one line says so, and nothing of a build is missed."""
    real, required = importlib.metadata.version, importlib.metadata.requires("fastcar_compile") or []
    extras = {environment.Requirement(text).name for text in required if "extra ==" in text}
    base = {environment.Requirement(text).name for text in required if "extra ==" not in text}

    def version(name: str) -> str:
        if name in extras - base:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    found = by_name()
    assert found["installation"].message.startswith("runtime only")
    assert "[compile]" in found["installation"].hint
    assert {check.severity for check in found.values()} == {"ok", "info"}
    assert not {"torch", "onnx", "hls4ml", "ziglang", "vitis", "aarch64-linux-gnu-g++"} & found.keys()
    text = fastcar("doctor")
    assert (text.exit_code, text.stdout.count("runtime only")) == (0, 1)


def test_a_tool_that_does_not_run_counts_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "g++").write_text("no program")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert by_name()["g++"].severity == "error"


def test_packages_that_are_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torch", "numpy"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "99.0" if name in ("onnxruntime", "apache-tvm") else real(name)

    extras = {"torch": "compile", "onnxruntime": "onnxruntime"}
    base = ["numpy>=2,<3", "apache-tvm<0.28,>=0.27", 'fastcar_compile[onnxruntime]; extra == "compile"']
    required = [*base, *(f'{name}>=1,<90; extra == "{extra}"' for name, extra in extras.items())]
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    found = by_name()
    assert {n: found[n].severity for n in ("torch", "numpy", "onnxruntime", "apache-tvm")} == {
        "torch": "warning", "numpy": "error", "onnxruntime": "warning", "apache-tvm": "error",
    }  # fmt: skip
    assert found["torch"].hint == 'pip install "fastcar_compile[compile]"'
    assert found["apache-tvm"].message == "99.0 (wants <0.28,>=0.27)"


@pytest.mark.parametrize(("free", "severity"), first_often([(10**8, "error"), (10**9, "warning"), (10**10, "ok")]))
def test_the_temporary_folder_needs_room(free: int, severity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert by_name()["TMPDIR"].severity == severity


def test_no_temporary_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    assert by_name()["TMPDIR"].message.endswith("No usable temporary directory found")


def test_an_old_cpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cpu_flags", lambda: frozenset({"sse2"}))
    assert by_name()["cpu"].severity == "error"
