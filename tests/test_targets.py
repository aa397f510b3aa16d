"""Target files: the figures the design fixes, and the text of every refusal."""

from pathlib import Path

import pytest

import fastcar_compile as fc
import fastcar_compile.config.targets as targets
from fastcar_compile.config.targets import Target, available_targets, load_target, require_buildable
from fastcar_compile.errors import TargetError

FOLDER = Path(targets.__file__).parent


def write_variant(folder: Path, old: str, new: str) -> Path:
    """The zcu102 file with one text replaced, as a new file."""
    text = (FOLDER / "zcu102.toml").read_text()
    assert old in text
    path = folder / "board.toml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("name", available_targets())
def test_shipped_targets_load_and_name_their_sources(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert (target.fabric is None) == (target.kind == "cpu")
    assert "estimate" in target.power.source
    assert target.peak_bandwidth > 0
    if target.kind == "fpga" and target.estimate_only is None:
        assert all(memory.connections for memory in target.memories)
        assert all(memory.measured is not None for memory in target.weight_memories)


def test_memory_of_the_processing_system_as_its_manual_has_it() -> None:
    """UG1085: AXI3 behind the ports, so 16 beats of 128 bits; HP1 and HP2 share a port of the controller."""
    for name in ("zcu102", "kv260", "zcu104"):
        (memory,) = load_target(name).memories
        assert memory.burst_bytes == 16 * 128 // 8
        controllers = {connection.tag: connection.controller for connection in memory.connections}
        assert list(controllers) == ["HP0", "HP1", "HP2", "HP3", "HPC0", "HPC1"]
        assert controllers["HP1"] == controllers["HP2"]
        assert len({controllers[tag] for tag in ("HP0", "HP1", "HP3", "HPC0")}) == 4
        assert memory.bank_bytes is None


def test_a_target_for_estimates_only_is_not_compiled_for() -> None:
    text = r"no artifact can be built for zcu104-sodimm, which serves estimates only: no base platform"
    with pytest.raises(TargetError, match=text) as caught:
        fc.compile("no such model", target="zcu104-sodimm")
    builds = "cpu, kv260, u280, u55c, wasm32, webgpu, zcu102, zcu104"
    assert f"use `fastcar estimate`, or compile for one of: {builds}" in str(caught.value)
    require_buildable(load_target("zcu104"))


def test_a_target_passes_through_and_a_path_is_read() -> None:
    target = load_target(FOLDER / "u280.toml")
    assert load_target(target) is target
    assert load_target(str(FOLDER / "u280.toml")) == target
    assert Target.model_validate_json(target.model_dump_json()) == target


def test_unknown_target_lists_all_and_the_nearest() -> None:
    with pytest.raises(TargetError) as caught:
        load_target("zcu12")
    assert "unknown target 'zcu12'" in str(caught.value)
    assert "did you mean 'zcu102'?" in str(caught.value)
    assert "available: cpu, kv260, u280, u55c, wasm32, webgpu, zcu102, zcu104" in str(caught.value)


def test_all_bad_fields_at_once(tmp_path: Path) -> None:
    text = (FOLDER / "zcu102.toml").read_text()
    text = text.replace("lut = 274_080", "lut = -5").replace("dsp = 2_520\n", "").replace("lut = 0.70", "lut = 1.7")
    path = tmp_path / "board.toml"
    path.write_text(text)
    with pytest.raises(TargetError) as caught:
        load_target(path)
    message = str(caught.value)
    assert "the target file has 3 bad fields" in message
    assert "fabric.lut: Input should be greater than or equal to 0 (given: -5)" in message
    assert "fabric.dsp: Field required" in message
    assert "limits.lut: Input should be less than or equal to 1 (given: 1.7)" in message
    assert caught.value.where == str(path)


NAME = 'name = "zcu102"'
NO_NAMES = ("zcu\\n102", "", " ", "..", "../zcu102", "a/b", "a\\\\b", "a$b", "a\\u2028b", "b\u00e9", "-a", "a" * 81)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('kind = "fpga"', 'kind = "cpu"', 'kind = "cpu" has no part, fabric, limits'),
        ('part = "xczu9eg-ffvb1156-2-e"\n', "", 'kind = "fpga" needs part'),
        ('kind = "fpga"', 'kind = "gpu"', "kind: Input should be 'fpga' or 'cpu' (given: 'gpu')"),
        ("peak_bandwidth = 17.064e9", "peak_bandwidth = inf", "memories.0.peak_bandwidth: Input should be a finite"),
        *((NAME, f'name = "{name}"', "name: String should match pattern") for name in NO_NAMES),
        ("ports = 6", "ports = 5", "6 connections are named for 5 ports"),
        ('tag = "HP1"', 'tag = "HP0"', "tags are not unique: HP0, HP0, HP2"),
    ],
)
def test_bad_field(tmp_path: Path, old: str, new: str, text: str) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(write_variant(tmp_path, old, new))
    assert text in str(caught.value)
