"""Step programs: the binary form, its checks in Python and in C++, and what the builder writes."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from fastcar_compile.errors import UserError
from fastcar_compile.step.builder import CachePlan, ReplayPlan, build_step
from fastcar_compile.step.encoding import cpp_constants
from fastcar_compile.step.instructions import KINDS, Add, Attend, End, Load, Norm, Opcode, Place
from fastcar_compile.step.program import Status, StepProgram, check, read_program
from step.conftest import Cores
from step.programs import HEADS, plan, repaired

CAPACITY = 64
"""Instructions that the tests' engine holds."""

PROGRAM = build_step(plan())
NORMED = build_step(plan(replace(HEADS, head_norm=True, rotary=16, cache=CachePlan(4, 30, 20)), layers=3, rows=1))
PLAIN = build_step(plan(replace(HEADS, rotary=0)))
GATED = build_step(plan(replay=ReplayPlan(7, (False, True))))


@pytest.mark.parametrize("program", [PROGRAM, NORMED, PLAIN, GATED], ids=["rotated", "normed", "plain", "gated"])
def test_the_binary_form_keeps_everything(cores: Cores, program: StepProgram) -> None:
    data = program.to_bytes()
    assert read_program(data) == program
    assert read_program(data).to_bytes() == data
    assert answer(cores, data) is Status.OK
    twin = json.loads(json.dumps(program.to_json()))
    assert [i["opcode"] for i in twin["instructions"]] == [i.opcode.name for i in program.instructions]
    assert (twin["rows"], twin["instructions"][0]["target"]) == (program.sizes.rows, "X")


def test_a_layer() -> None:
    """Values are stored before anything is written over q, k and v."""
    normed = [i.opcode for i in NORMED.instructions if i.layer == 1]
    common = [Opcode.APPEND_KEYS, Opcode.ATTEND, Opcode.LINEAR, Opcode.ADD, Opcode.NORM, Opcode.MLP, Opcode.ADD]
    start = [Opcode.NORM, Opcode.LINEAR, Opcode.APPEND_VALUES]
    assert normed == [*start, Opcode.NORM, Opcode.NORM, Opcode.ROTATE, Opcode.ROTATE, *common]
    assert [i.opcode for i in PLAIN.instructions if i.layer == 1] == [*start, *common]
    replays = [i.opcode for i in GATED.instructions if i.layer == 1][6:]
    assert replays == [Opcode.DECIDE, *common[1:-1], Opcode.REPLAY]
    assert all(i.opcode not in (Opcode.DECIDE, Opcode.REPLAY) for i in GATED.instructions if i.layer == 0)
    first, *_, last = PROGRAM.instructions
    assert (first, last) == (Load(0, Place.X, 16), End(2))


def test_the_words_of_an_instruction() -> None:
    words = Norm(3, Place.X, Place.A, 4, 5, 6, 7, 0.25, 1.5).words
    assert words == (2 | 3 << 16, 0, 1, 4, 5, 6, 7, 0x3E800000, 0x3FC00000, *[0] * 7)
    assert set(KINDS) == set(Opcode)


def test_the_header_of_the_hardware_is_that_of_python() -> None:
    assert (files("hls_templates") / "fastcar_step_fields.hpp").read_text() == cpp_constants()


def answer(cores: Cores, data: bytes) -> Status:
    """What the hardware's loader says; Python says the same."""
    words = np.frombuffer(data + bytes(-len(data) % 16), np.uint8)
    status = Status(int(cores("load", words, len(data))[-1]))
    assert status is check(data, CAPACITY)
    return status


def changed(data: bytes, at: int, value: int) -> bytes:
    """`data` with one word replaced and a CRC-32 that fits."""
    words = list(struct.unpack(f"<{len(data) // 4}I", data))
    words[at] = value
    return repaired(words)


def test_each_check(cores: Cores) -> None:
    data = PROGRAM.to_bytes()
    flipped = bytes([*data[:-1], 1])
    assert answer(cores, data[:60]) is Status.TOO_SHORT
    assert answer(cores, changed(data, 0, 7)) is Status.BAD_MAGIC
    assert answer(cores, changed(data, 1, 2)) is Status.BAD_VERSION
    assert answer(cores, data + b"\0") is Status.BAD_LENGTH
    assert answer(cores, data[:-4]) is Status.BAD_LENGTH
    assert answer(cores, flipped) is Status.BAD_CRC
    for word, value in ((4, 3), (5, 0), (5, 33), (6, 0), (6, 65), (7, 0), (8, 1 << 16), (9, 1 << 31), (15, 1 << 31)):
        assert answer(cores, changed(data, word, value)) is Status.BAD_HEADER, word
    too_long = build_step(plan(layers=6))
    assert (answer(cores, too_long.to_bytes()), check(too_long.to_bytes())) == (Status.BAD_LENGTH, Status.OK)
    with pytest.raises(UserError, match="BAD_CRC, its CRC-32 does not match"):
        read_program(flipped)


def test_what_reaches_outside_of_a_buffer_is_refused(cores: Cores) -> None:
    """Every size of the header, one less than the program needs; END in the middle, at no end."""
    sizes = GATED.sizes
    for name in (
        "replay_words",
        "row_words",
        "constant_words",
        "key_words",
        "value_words",
        "input_words",
        "output_words",
        "positions",
    ):
        smaller = replace(GATED, sizes=replace(sizes, **{name: getattr(sizes, name) - 1}))
        assert answer(cores, smaller.to_bytes()) is Status.BAD_INSTRUCTION, name
    add, end = Add(0, Place.Y, Place.X, 16), End(0)
    for listed, status in (
        ((add, end), Status.OK),
        ((add,), Status.BAD_INSTRUCTION),
        ((add, end, end), Status.BAD_INSTRUCTION),
        ((Add(0, Place.X, Place.X, 16), end), Status.BAD_INSTRUCTION),
        ((Add(0, Place.OUTPUT, Place.X, 16), end), Status.BAD_INSTRUCTION),
    ):
        assert answer(cores, StepProgram(sizes, listed).to_bytes()) is status, listed


def test_damaged_programs_are_judged_alike(cores: Cores) -> None:
    """Words replaced by likely ones, in programs of all three kinds."""
    rng, seen = np.random.default_rng(0), dict.fromkeys(Status, 0)
    likely = [0, 1, 2, 3, 4, 5, 6, 10, 15, 16, 17, 32, 40, 64, 255, 65535, 65536, 1 << 30, 1 << 31, (1 << 32) - 1]
    for round_number in range(1500):
        data = (NORMED, PLAIN, GATED)[round_number % 3].to_bytes()
        words = list(struct.unpack(f"<{len(data) // 4}I", data))
        for _ in range(int(rng.integers(0, 3))):
            header = rng.random() < 0.1
            at = int(rng.integers(0, 16) if header else rng.integers(16, len(words)))
            words[at] = int(rng.choice(likely)) if rng.random() < 0.8 else words[at] ^ 1 << int(rng.integers(32))
        cut = int(rng.integers(1, 80)) if rng.random() < 0.05 else 0
        seen[answer(cores, repaired(words)[: 4 * len(words) - cut])] += 1
    assert min(seen[s] for s in (Status.OK, Status.BAD_LENGTH, Status.BAD_HEADER, Status.BAD_INSTRUCTION)) > 20, seen


def test_what_cannot_be_built_is_named() -> None:
    wrong = replace(HEADS, head_dim=48, rotary=12, key_heads=3)
    with pytest.raises(UserError, match=r"heads of 48 elements .*; 4 heads on 3 key heads; 12 rotating elements"):
        build_step(plan(wrong))
    with pytest.raises(UserError, match="gates of 1 layers for 2 layers"):
        build_step(plan(replay=ReplayPlan(7, (True,))))
    with pytest.raises(UserError, match="ROTATE of layer 0"):
        build_step(plan(replace(HEADS, table_rows=0)))


def test_offsets_of_layers_and_caches_do_not_overlap() -> None:
    attends = [i for i in NORMED.instructions if isinstance(i, Attend)]
    stride = attends[1].keys - attends[0].keys
    assert [a.keys for a in attends] == [0, stride, 2 * stride]
    assert 3 * stride == NORMED.sizes.key_words
    weights = [i for i in NORMED.instructions if isinstance(i, Norm)]
    assert len({i.weight for i in weights}) == 3 * 4 + 1


def test_the_reference_names_every_instruction_and_status() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "step_program.md").read_text("utf-8")
    for kind in KINDS.values():
        fields = ", ".join(field.name for field in dataclasses.fields(kind)[1:])
        assert f"| {kind.opcode.value} {kind.opcode.name} | {fields}" in text
    for status in Status:
        assert f"| {status.value} | {status.name} |" in text
