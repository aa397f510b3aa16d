"""Step programs: the binary form, its checks in Python and in C++, and what the builder writes."""

import inspect
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drs.tables import changed, repaired

from fastcar_compile.codegen.hls.control_table.table import HEADER_WORDS, TableStatus
from fastcar_compile.codegen.hls.design.spec import DraftSpec
from fastcar_compile.codegen.hls.step_program.builder import CacheForm, ReplayForm
from fastcar_compile.codegen.hls.step_program.instruction import Place, field_notes
from fastcar_compile.codegen.hls.step_program.instructions import (
    Add,
    End,
    Mlp,
    Norm,
)
from fastcar_compile.codegen.hls.step_program.program import KINDS, StepProgram, check, read_program
from fastcar_compile.codegen.hls.step_program.replaying import Decide
from fastcar_compile.errors import UserError
from fastcar_compile.gates.registry import GateKind
from step.conftest import Cores
from step.programs import HEADS, LIMITS, binary, built

PROGRAM = built()
NORMED = built(replace(HEADS, head_norm=True, rotary=16, cache=CacheForm(4, 30, 20)), layers=3, rows=1)
PLAIN = built(replace(HEADS, rotary=0))
GATED = built(replay=ReplayForm(7, (False, True)))
LEARNED = built(replay=ReplayForm(7, (False, True), GateKind.LEARNED, units=(0, 3)))
DELTA = built(replay=ReplayForm(7, (False, True), GateKind.INPUT_DELTA))


CENTERED = built(replace(HEADS, head_norm=True), layer_norms=True, headed=False)
DRAFTED = built(replay=ReplayForm(7, (False, True), GateKind.INPUT_DELTA), drafts=[DraftSpec(1, 12, 4)])


PROGRAMS = {"rotated": PROGRAM, "normed": NORMED, "plain": PLAIN, "tas": GATED, "learned": LEARNED}
PROGRAMS |= {"input_delta": DELTA, "drafts": DRAFTED, "layer norms": CENTERED}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_binary_form_keeps_everything(cores: Cores, program: StepProgram) -> None:
    data = binary(program)
    assert read_program(data) == program
    assert binary(read_program(data)) == data
    assert answer(cores, data) is TableStatus.OK
    twin = json.loads(json.dumps(program.to_json()))
    assert [i["opcode"] for i in twin["instructions"]] == [i.name for i in program.instructions]
    assert (twin["rows"], twin["instructions"][1]["source"]) == (program.sizes.rows, "X")


def test_the_words_of_an_instruction() -> None:
    words = Norm(3, Place.Y, 4, 5, 6, 7, 0.25, 1.5).words
    assert words == (2 | 3 << 16, 2, 4, 5, 6, 7, 0x3E800000, 0x3FC00000, *[0] * 8)
    assert list(KINDS) == list(range(1, 19))


def answer(cores: Cores, data: bytes) -> TableStatus:
    """What the hardware's loader says; Python says the same."""
    words = np.frombuffer(data + bytes(-len(data) % 16), np.uint8)
    status = TableStatus(int(cores("load", words, len(data))[-1]))
    assert status is check(data, LIMITS)
    return status


def test_each_check(cores: Cores) -> None:
    data = binary(PROGRAM)
    flipped = bytes([*data[:-1], 1])
    assert answer(cores, data[:140]) is TableStatus.TOO_SHORT
    assert answer(cores, changed(data, 0, 7)) is TableStatus.BAD_MAGIC
    assert answer(cores, changed(data, 1, 2)) is TableStatus.BAD_VERSION
    assert answer(cores, data + b"\0") is TableStatus.BAD_LENGTH
    assert answer(cores, data[:-4]) is TableStatus.BAD_LENGTH
    assert answer(cores, flipped) is TableStatus.BAD_CRC
    sizes = (
        (23, 0),
        (23, 129),
        (24, 0),
        *((word, 1 << 16) for word in (25, 26, 27)),
        (25, 64),
        (28, 1 << 31),
        (34, 1 << 31),
        (35, 0),
        (35, 3),
    )
    for word, value in ((22, 3), (5, 0), (5, 33), *sizes):
        assert answer(cores, changed(data, word, value)) is TableStatus.BAD_HEADER, word
    too_long = built(layers=6)
    assert (answer(cores, binary(too_long)), check(binary(too_long))) == (TableStatus.BAD_LENGTH, TableStatus.OK)
    with pytest.raises(UserError, match="BAD_CRC, its CRC-32 does not match"):
        read_program(flipped)


def test_what_reaches_outside_of_a_buffer_is_refused(cores: Cores) -> None:
    """Every size of the header, one less than the program needs; no END at the end."""
    sizes = GATED.sizes
    every = (
        "x_words",
        "a_words",
        "y_words",
        "constant_words",
        "key_words",
        "value_words",
        "input_words",
        "output_words",
        "positions",
    )
    for program in (GATED, LEARNED, DELTA, DRAFTED):
        for name in ("replay_words", *every):
            smaller = replace(program, sizes=replace(program.sizes, **{name: getattr(program.sizes, name) - 1}))
            assert answer(cores, binary(smaller)) is TableStatus.BAD_INSTRUCTION, name
    add, end = Add(0, 16), End(0)
    for listed, status in (
        ((add, end), TableStatus.OK),
        ((add,), TableStatus.BAD_INSTRUCTION),
        ((add, end, end), TableStatus.OK),
        ((Add(0, 17), end), TableStatus.BAD_INSTRUCTION),
        ((Norm(0, Place.A, 0, 16, 1, 0, 1.0, 1.0), end), TableStatus.BAD_INSTRUCTION),
        ((Mlp(0, Place.X, Place.Y, 0), end), TableStatus.BAD_INSTRUCTION),
        ((Mlp(0, Place.A, Place.X, 0), end), TableStatus.BAD_INSTRUCTION),
    ):
        assert answer(cores, binary(StepProgram(sizes, listed))) is status, listed


def test_a_decision_of_another_gate_is_refused(cores: Cores) -> None:
    """Each gate in the place of each: its fields are not those that it reads. Each field one too large."""
    for program in (GATED, LEARNED, DELTA):
        (decide,) = (i for i in program.instructions if isinstance(i, Decide))

        def judged(changed: Decide, listed: StepProgram = program) -> TableStatus:
            return answer(cores, binary(StepProgram(listed.sizes, (changed, End(0)))))

        reads = decide.gate.reads_query, decide.gate.reads_input, decide.gate is GateKind.LEARNED
        for kind in GateKind:
            alike = (kind.reads_query, kind.reads_input, kind is GateKind.LEARNED) == reads
            assert judged(replace(decide, gate=kind)) is (TableStatus.OK if alike else TableStatus.BAD_INSTRUCTION)
        for name in ("heads", "key_heads", "blocks", "keys", "sinks", "ring", "count", "inputs"):
            if not getattr(decide, name):
                read = reads[1] if name in ("count", "inputs") else reads[0]
                assert judged(replace(decide, **{name: 1})) is TableStatus.BAD_INSTRUCTION or read
        assert judged(replace(decide, units=4097)) is TableStatus.BAD_INSTRUCTION
        assert judged(replace(decide, stride=decide.stride << 16)) is TableStatus.BAD_INSTRUCTION


def test_damaged_programs_are_judged_alike(cores: Cores) -> None:
    """Words replaced by likely ones, in programs of all kinds."""
    rng, seen = np.random.default_rng(0), dict.fromkeys(TableStatus, 0)
    damaged = [binary(program) for program in (NORMED, PLAIN, GATED, LEARNED, DELTA, DRAFTED, CENTERED)]
    likely = [0, 1, 2, 3, 4, 5, 6, 10, 15, 16, 17, 32, 40, 64, 255, 65535, 65536, 1 << 30, 1 << 31, (1 << 32) - 1]
    for round_number in range(1500):
        data = damaged[round_number % len(damaged)]
        words = list(struct.unpack(f"<{len(data) // 4}I", data))
        for _ in range(int(rng.integers(0, 3))):
            header = rng.random() < 0.1
            at = int(rng.integers(0, HEADER_WORDS) if header else rng.integers(HEADER_WORDS + 4, len(words)))
            words[at] = int(rng.choice(likely)) if rng.random() < 0.8 else words[at] ^ 1 << int(rng.integers(32))
        cut = int(rng.integers(1, 80)) if rng.random() < 0.05 else 0
        seen[answer(cores, repaired(words)[: 4 * len(words) - cut])] += 1
    assert (
        min(
            seen[s]
            for s in (TableStatus.OK, TableStatus.BAD_LENGTH, TableStatus.BAD_HEADER, TableStatus.BAD_INSTRUCTION)
        )
        > 20
    ), seen


def test_the_reference_has_a_row_for_every_instruction() -> None:
    """Number, name, fields and what the class says first; the page has links besides."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "drs_table.md").read_text("utf-8")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for number, kind in KINDS.items():
        does = str(inspect.getdoc(kind)).split("\n\n")[0].removesuffix(".")
        fields = "".join(f" {name}," for name in field_notes(kind)).rstrip(",")
        assert f"| {number} {kind.name} |{fields} | {does} |\n" in plain


def test_few_files_name_an_instruction() -> None:
    """Where it is declared with its cost, emitted, executed in Python, and executed in the kernel."""
    root = Path(__file__).parents[2]
    paths = [p for folder in ("fastcar_compile", "hls_templates") for p in (root / folder).rglob("*") if p.is_file()]
    naming = {
        p.name for p in paths if p.suffix != ".pyc" and re.search(r"(?<!DRAFT_)RECALL|Recall", p.read_text("utf-8"))
    }
    assert naming == {"replaying.py", "builder.py", "simulator.py", "fastcar_step_rows.hpp"}
