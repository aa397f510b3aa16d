"""Files of sessions: what no session can be is refused by name, and the session that was to read it goes on."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import decoders
import numpy as np
import pytest

import fastcar_compile as fc
from fastcar_compile.errors import ArtifactError, InputError, UserError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session
from fastcar_compile.support.values import read_arrays

FRAME, LENGTH, ROWS = 5, 40, 2
REPLAY = fc.ReplayConfig(threshold=0.0)
IDS = np.random.default_rng(0).integers(0, 17, (ROWS, LENGTH))
Arrays = dict[str, Any]
Change = Callable[[Any], Any]


@cache
def program() -> DecoderProgram:
    sizes = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "batch_size": ROWS}
    return decoders.rewritten(decoders.llama(), 4, replay=REPLAY, rows=1, kv="int8", **sizes)


def opened(keep: int = 0) -> Session:
    """A session over the rewritten graph in eager PyTorch; nothing is lowered."""
    own = program()
    limits = REPLAY.thresholds(len(own.sites))
    return Session(EagerStepper(own), own.config, limits, record=True, gate=REPLAY.gate, keep=keep)


@pytest.fixture(scope="module")
def rows() -> Session:
    """A session that holds prompts of two lengths and two frames, with replays."""
    found = opened()
    found.prefill([IDS[0, :9], IDS[1, :4]])
    for t in range(9, 9 + 2 * FRAME + 2):
        found.step(IDS[:, t])
    assert found.stats.decisions.any()
    return found


def written(path: Path, arrays: Arrays) -> Path:
    with path.open("wb") as stream:
        np.savez(stream, **arrays)
    return path


def said(arrays: Arrays, **changes: Any) -> Arrays:
    """The arrays with other numbers; None: without."""
    about = json.loads(arrays["about"].tobytes()) | changes
    kept = {name: value for name, value in about.items() if value is not ...}
    return arrays | {"about": np.frombuffer(json.dumps(kept).encode(), np.uint8)}


def at(value: Any, *index: int) -> Change:
    """Put a value at a place of an array; of one without a value, it stays."""

    def change(array: Any) -> Any:
        changed = np.array(array)
        if changed.size:
            changed[index or (0,) * changed.ndim] = value
        return changed

    return change


CHANGES: list[tuple[str, Change, str]] = [
    ("behind", at(-(10**7)), r"behind\[0\] is -10000000, expected 0 to 20"),
    ("behind", at(44), r"behind\[0\] is 44, expected 0 to 20"),
    ("behind", lambda a: a + 1, "the least of behind is 1, expected 0 to 0"),
    ("last", at(2**40), r"last\[0\] is 1099511627776"),
    ("last", at(-3), r"last\[0\] is -3"),
    ("last", at(6), r"the slot of last\[0\] is 1, expected 0 to 0"),
    ("replays", at(8), r"replays\[0, 0\] is 8"),
    ("places", at(0), r"places\[0\] is 0, expected 9 to 20"),
    ("places", at(10), "the number of different places is 11, expected 12 to 12"),
    ("thresholds", lambda a: a[:1], r"thresholds is float32 \[1\], expected float32 \[2\]"),
    ("thresholds", at(np.nan), "the threshold of layer 0 is NaN"),
    ("state.mlp_cache_0", at(np.nan), "state.mlp_cache_0 holds values that are not finite"),
    ("state.mlp_cache_0", lambda a: a.astype(">f4"), r"state.mlp_cache_0 is >f4 .*, expected float32"),
    ("state.mlp_cache_0", lambda a: a[:, :1], r"state.mlp_cache_0 is float32 \[5, 1, 64\], expected float32 \[5, 2"),
    ("state.chain_count_1", at(3), r"state.chain_count_1\[0, 0\] is 3, expected 0 to 2"),
    ("state.key_cache_0", at(-128, 0, 0, 0, -1), "state.key_cache_0 holds values that are not finite"),
]
NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"first": 2**40}, "first.*less than or equal"),
    ({"first": 21}, "first is 21, expected 0 to 20"),
    ({"first": None}, "forwards is 12, expected 0 to 0"),
    ({"position": LENGTH + 1}, "position is 41, expected 0 to 40"),
    ({"eligible": 13}, "eligible is 13, expected 0 to 12"),
    ({"context": True}, "context is 1, expected 0 to 0"),
    ({"position": "21"}, "position.*valid integer"),
    ({"digest": f"sha256:{'0' * 64}"}, "the session is of the artifact sha256:0000.*, this one is"),
    ({"more": 1}, "the session is malformed: more"),
]


# numpy leaves a file to the garbage collector that begins like a .npz file and does not end like one.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_wrong_is_named_and_changes_nothing(rows: Session, tmp_path: Path) -> None:
    """tests/fuzz has any change of a file."""
    rows.save(tmp_path / "saved")
    whole = (tmp_path / "saved").read_bytes()
    arrays = read_arrays(tmp_path / "saved", "session", "")
    wrong = [(arrays | {name: change(arrays[name])}, text) for name, change, text in CHANGES]
    wrong += [(said(arrays, **numbers), text) for numbers, text in NUMBERS]
    wrong += [({n: a for n, a in arrays.items() if n != "state.value_cache_1"}, "state.value_cache_1 is missing")]
    wrong += [(arrays | {"state.value_cache_2": np.zeros(2)}, "'state.value_cache_2' is unknown")]
    wrong += [({"a": arrays["about"]}, "this file is no session")]
    for changed, text in wrong:
        with pytest.raises(ArtifactError, match=text):
            rows.load(written(tmp_path / "file", changed))
    for content in (whole[:-9], whole[: len(whole) // 2], b""):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(InputError, match="the session cannot be read"):
            rows.load(tmp_path / "file")
    rows.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == whole


def test_rows_at_different_positions_cannot_be_taken_back(rows: Session, tmp_path: Path) -> None:
    rows.save(tmp_path / "saved")
    with opened(keep=3) as other, pytest.raises(InputError, match="different positions"):
        other.load(tmp_path / "saved")


def test_what_is_no_plain_file_is_not_read(rows: Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)
    texts = {
        "/dev/zero": "it is a device",
        tmp_path / "pipe": "it is a pipe",
        tmp_path: "it is a folder, not a plain file",
    }
    for path, text in (texts | {tmp_path / "large": "it has 1099511627776 bytes, and at most"}).items():
        with pytest.raises(InputError, match=f"the session cannot be read: {text}"):
            rows.load(path)


def test_a_refused_file_does_not_take_the_session_over(rows: Session, tmp_path: Path) -> None:
    """Another thread may load, which makes the session its own. What it cannot load leaves the session to its owner."""
    errors: list[Exception] = []

    def load() -> None:
        try:
            rows.load(written(tmp_path / "file", {"a": np.zeros(1)}))
        except ArtifactError as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert len(errors) == 1
    with rows.fork() as other:
        other.step(IDS[:, 0])


# Writing: where a file goes, and what it leaves.


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_keeps_its_mode_and_its_links(rows: Session, tmp_path: Path) -> None:
    old, link, private = tmp_path / "old", tmp_path / "link", tmp_path / "private"
    old.write_bytes(b"")
    old.chmod(0o600)
    link.symlink_to("old")
    rows.save(link)
    assert link.is_symlink()
    assert mode(old) == 0o600
    before = os.umask(0o077)
    try:
        rows.save(private)
        (tmp_path / "dangling").symlink_to("new")
        rows.save(tmp_path / "dangling")
    finally:
        os.umask(before)
    assert [mode(path) for path in (private, tmp_path / "new")] == [0o600, 0o600]
    rows.load(link)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link", "private", "dangling", "new"}


def test_what_is_no_plain_file_is_not_replaced(rows: Session, tmp_path: Path) -> None:
    pipe, looped = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    looped.symlink_to("loop")
    for path in (pipe, tmp_path):
        with pytest.raises(UserError, match="the session cannot be saved: it is a folder, a device or a pipe"):
            rows.save(path)
    with pytest.raises(UserError, match="the session cannot be saved: Too many levels of symbolic links"):
        rows.save(looped)
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "loop"}


KILLED = """
import sys
from pathlib import Path
import fastcar_compile.support.files as files
with files.replacing(Path(sys.argv[1])) as stream:
    stream.write(b"new")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_save_leaves_the_old_file_alone(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", subprocess.PIPE
    file.write_bytes(b"old")
    with subprocess.Popen([sys.executable, "-c", KILLED, str(file)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
