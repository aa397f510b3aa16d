"""The build cache where the disk, other users, killed builds or a store misbehave: no build fails, none is wrong."""

import errno
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.conftest import Fastcar, fastcar, refused  # noqa: F401  (fastcar is a fixture)
from test_cache import DATA, KEY, file_of, kept, taken

from fastcar_compile.artifact import cache as caches
from fastcar_compile.artifact import store as stores
from fastcar_compile.artifact.cache import Cache, Entry, Kind
from fastcar_compile.artifact.digest import UserDigests, private_folder
from fastcar_compile.artifact.writer import ArtifactWriter, NotKept
from fastcar_compile.errors import UserError
from fastcar_compile.runtime.backends import hls_csim

CAS = file_of(DATA).sha256


def entry_text(key: str = KEY, **changes: Any) -> bytes:
    """Bytes of a right entry with one file of `DATA`, or with other fields."""
    return Entry.model_validate({"files": {"a": file_of(DATA).model_dump()}} | changes).sealed(key)


# Damage.


def letter(text: bytes) -> bytes:
    return text.replace(b'"a": {', b'"b": {')


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a letter of a name": letter,
    "a field more": lambda text: text.replace(b"{\n", b'{\n  "x": 1,\n', 1),
    "cut": lambda text: text[:-9],
    "not UTF-8": lambda text: text + b"\xff",
    "too large": lambda text: text + b" " * caches.limits.ENTRY_BYTES,
    "an entry of another key": lambda _: entry_text("1" * 64),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_entry_is_a_miss_that_is_named_and_made_again(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path / "cache")
    kept(cache, tmp_path)
    path = cache.folder / "ac" / KEY
    whole = path.read_bytes()
    changed = DAMAGE[what](whole)
    assert changed != whole
    path.unlink()
    path.write_bytes(changed)
    assert taken(cache, tmp_path) is None
    assert f"entry {KEY} of the build cache is damaged" in caplog.text
    kept(cache, tmp_path)
    assert path.read_bytes() == whole
    assert taken(cache, tmp_path) == DATA


INSTEAD: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda path: (path / "inside").mkdir(parents=True),
    "a pipe": os.mkfifo,
    "a link to the file": lambda path: (path.with_name("moved").write_bytes(DATA), path.symlink_to("moved")),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("place", ["ac", "cas"])
@pytest.mark.parametrize("what", INSTEAD)
def test_what_stands_in_a_files_place_is_named_and_replaced(
    what: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(caches, "LINKED", len(DATA))
    cache = Cache(tmp_path / "cache")
    kept(cache, tmp_path)
    path = cache.folder / place / (KEY if place == "ac" else CAS)
    path.unlink()
    INSTEAD[what](path)
    assert taken(cache, tmp_path) is None
    assert "is not a plain file" in caplog.text
    kept(cache, tmp_path)
    assert taken(cache, tmp_path) == DATA
    assert path.is_file()
    assert not path.is_symlink()
    assert not (tmp_path / "taken_a").is_symlink()


@pytest.mark.parametrize("names", [["../a"], ["/a"], [""], ["a\\b"], ["a", "a/b"]])
def test_an_entry_names_no_file_outside_of_an_artifact_or_in_another(names: list[str]) -> None:
    with pytest.raises(ValueError, match="files"):
        Entry(files=dict.fromkeys(names, file_of(DATA)))


def test_a_build_whose_manifest_names_other_files_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path / "cache")
    texts = {"manifest.json": json.dumps({"files": {"a": file_of(DATA).model_dump()}}).encode(), "b": DATA}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    entry = Entry(files={name: file_of(text) for name, text in texts.items()}, about=[])
    cache.keep(Kind.BUILD, KEY, {name: tmp_path / name for name in texts}, entry)
    with suppress(NotKept), ArtifactWriter(tmp_path / "artifact", cache) as writer:
        writer.take(KEY)
        raise AssertionError("it was taken")
    assert "other files than its manifest" in caplog.text
    assert not (tmp_path / "artifact").exists()


def test_notes_that_are_no_json_fail_no_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a warning that names a path which is not UTF-8."""
    (tmp_path / "made").write_bytes(DATA)
    entry = Entry(files={"a": file_of(DATA)}, about=[["model\udcff", False]])
    Cache(tmp_path / "cache").keep(Kind.WEIGHTS, KEY, {"a": tmp_path / "made"}, entry)
    assert "cannot be written" in caplog.text


# Errors of the system, at every place.

CALLS = ("open", "lstat", "stat", "mkdir", "chmod", "fchmod", "link", "replace", "rename", "unlink", "utime", "scandir")
CALLS += ("listdir", "preadv", "fstat")
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EIO, errno.ELOOP, errno.ENOTDIR)
ERRORS += (errno.EISDIR, errno.EMFILE, errno.ESTALE, errno.EDQUOT)


@contextmanager
def failing(patch: pytest.MonkeyPatch, folder: Path, at: int, number: int) -> Generator[list[str]]:
    """Let the call `at` of an operating system's function for a path in `folder` raise an error; yield the calls."""
    calls = list[str]()
    descriptors = set[int]()

    def inside(value: object) -> bool:
        if isinstance(value, int):
            return value in descriptors
        return isinstance(value, str | os.PathLike) and Path(value).is_relative_to(folder)

    def wrapped(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            ours = any(inside(value) for value in args[:2])
            if ours:
                calls.append(name)
                if len(calls) - 1 == at:
                    raise OSError(number, os.strerror(number), str(args[0]))
            result = real(*args, **kwargs)
            if name == "open":
                (descriptors.add if ours else descriptors.discard)(result)
            return result

        return call

    with patch.context() as inner:
        for name in CALLS:
            inner.setattr(os, name, wrapped(name, getattr(os, name)))
        yield calls


def built(cache: Cache, folder: Path) -> dict[str, bytes]:
    """A build in small: a large file and a small one, each made or taken, and settled."""
    folder.mkdir()
    found = dict[str, bytes]()
    for name, data in (("large", DATA), ("small", b"x")):
        place, key = folder / name, hashlib.sha256(name.encode()).hexdigest()
        if cache.fetch(Kind.WEIGHTS, key, lambda _, place=place: place, only="made", links=True) is None:
            assert not place.exists(), "nothing of a miss is left"
            place.write_bytes(data)
            cache.keep(Kind.WEIGHTS, key, {"made": place}, Entry(files={"made": file_of(data)}), links=True)
        found[name] = place.read_bytes()
    cache.settle({folder / "large": file_of(DATA)}, UserDigests(folder / "none"))
    return found


SHIFTS = [0, *(pytest.param(shift, marks=pytest.mark.thorough) for shift in range(1, len(ERRORS)))]


@pytest.mark.parametrize("state", ["empty", "full"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_no_error_of_the_cache_changes_or_ends_a_build(
    shift: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of a build fails once, each with another error; thorough tests give each call every error."""
    monkeypatch.setattr(caches, "LINKED", len(DATA))
    monkeypatch.setattr(caches.limits, "CACHE_BYTES", len(DATA))  # so that it trims itself, too
    at = 0
    while True:
        place = tmp_path / str(at)
        place.mkdir()
        if state == "full":
            built(Cache(place / "cache"), place / "first")
        with failing(monkeypatch, place / "cache", at, ERRORS[(at + shift) % len(ERRORS)]) as calls:
            assert built(Cache(place / "cache"), place / "second") == {"large": DATA, "small": b"x"}
        assert built(Cache(place / "cache"), place / "third") == {"large": DATA, "small": b"x"}
        if len(calls) <= at:
            break
        at += 1
    assert at > 20, "the cache is used"


def test_a_cache_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    cache = Cache(tmp_path / "cache")
    kept(cache, tmp_path)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    assert taken(cache, tmp_path) == DATA
    assert caplog.text == ""
    kept(cache, tmp_path, b"another", "1" * 64)
    assert "cannot be written: Read-only file system" in caplog.text.replace("[Errno 30] ", "")


# Other builds at the same time, and killed ones.


def test_builds_and_trims_at_the_same_time(tmp_path: Path) -> None:
    cache, problems = Cache(tmp_path / "cache"), list[BaseException]()

    def run(work: Callable[[int], object]) -> None:
        try:
            for number in range(15):
                work(number)
        except BaseException as error:
            problems.append(error)

    def build(number: int) -> None:
        own = tmp_path / f"{threading.get_ident()}-{number}"
        assert built(Cache(tmp_path / "cache"), own) == {"large": DATA, "small": b"x"}

    works = [build, build, lambda _: cache.trim(0), lambda _: cache.entries()]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_trimming_removes_what_killed_builds_left(tmp_path: Path) -> None:
    """tests/runtime/test_saved_sessions.py kills a writer: nothing is left where files may be without a name."""
    cache = Cache(tmp_path / "cache")
    kept(cache, tmp_path)
    old, new = (cache.folder / "cas" / f".{number}.1-{number}" for number in "12")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert cache.trim(1 << 20) == len(DATA)
    assert list(cache.folder.rglob(".*")) == [new], "its writer may live"
    assert taken(cache, tmp_path) == DATA


def test_the_command_shows_and_trims_and_leaves_odd_contents_alone(fastcar: Fastcar, tmp_path: Path) -> None:  # noqa: F811
    cache = Cache(tmp_path / "cache")
    kept(cache, tmp_path)
    (cache.folder / "ac" / "notes.txt").write_text("mine")
    os.mkfifo(cache.folder / "cas" / "pipe")
    (cache.folder / "ac" / ("2" * 64)).mkdir()
    (cache.folder / "other").mkdir()
    facts = {"folder": str(cache.folder), "bytes": len(DATA), "entries": 1}
    assert json.loads(fastcar("cache", "--folder", cache.folder, "--json").stdout) == facts
    assert "17 B" in fastcar("cache", "--folder", cache.folder, "--trim", "1.5 kB").stdout
    refused(fastcar("cache", "--folder", cache.folder, "--trim", "much"), "'much' is not a size")
    assert fastcar("cache", "--folder", cache.folder, "--trim", "0").exit_code == 0
    assert sorted(path.name for path in cache.folder.rglob("*")) == ["ac", "cas", "notes.txt", "other", "pipe"]


# Other users.


@pytest.mark.parametrize("place", ["", "ac", "cas", "digests.json"])
def test_a_part_that_others_may_write_is_refused(place: str, fastcar: Fastcar, tmp_path: Path) -> None:  # noqa: F811
    cache = Cache(tmp_path / "cache")
    kept(cache, tmp_path)
    cache.digests.known.clear()
    path = cache.folder / place
    if place == "digests.json":
        path.write_text("{}")
    for mode in (0o775, 0o757):
        path.chmod(mode)
        with pytest.raises(UserError, match="other users may write"):
            Cache(cache.folder)
        refused(fastcar("cache", "--folder", cache.folder), "other users may write", "chmod go-w")


def test_folders_are_private_whatever_the_umask_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCAR_CACHE", str(tmp_path / "parent" / "folder"))
    before = os.umask(0o002)
    try:
        kept(Cache(), tmp_path)
        UserDigests().save()
        os.umask(0o277)
        private_folder(tmp_path / "other" / "folder")
    finally:
        os.umask(before)
    folders = [path for path in (tmp_path / "parent", tmp_path / "other") for path in (path, *path.rglob("*"))]
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in folders if path.is_dir()}
    assert modes == dict.fromkeys([*modes], 0o700)
    assert {"parent", "parent/folder", "parent/folder/builds", "parent/folder/builds/ac", "other/folder"} <= set(modes)
    assert UserDigests().known == {}, "load(reread=False) takes the folder"


def test_simulations_are_kept_where_nobody_else_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = list[Path]()
    monkeypatch.setattr(hls_csim, "accelerator_of", lambda _: SimpleNamespace(kernels=()))
    monkeypatch.setattr(hls_csim, "sources_of", lambda _: {})
    monkeypatch.setattr(hls_csim, "open_library", lambda _, folder: folders.append(folder))
    monkeypatch.setattr(hls_csim, "CsimUnit", lambda _library, another: None)
    monkeypatch.setattr(hls_csim, "stepper_on", lambda *_: None)
    monkeypatch.setenv("FASTCAR_CACHE", str(tmp_path / "folder"))
    opened: Any = hls_csim.open_stepper
    before = os.umask(0o002)
    try:
        opened(None, None)
    finally:
        os.umask(before)
    assert {folder.stat().st_mode & 0o777 for folder in (folders[0], folders[0].parent)} == {0o700}
    folders[0].chmod(0o775)
    with pytest.raises(UserError, match="other users may write the libraries of C simulations"):
        opened(None, None)
    assert len(folders) == 1


# A store that does not behave.


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Generator[str]:
    """Serve connections by `answer` until the block ends; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def drip(connection: socket.socket, first: bytes, again: bytes, wait: float = 0.02) -> None:
    connection.recv(1 << 16)
    connection.sendall(first)
    while True:
        connection.sendall(again)
        time.sleep(wait)


OK = b"HTTP/1.1 200 OK\r\n"
SLOW: dict[str, Callable[[socket.socket], object]] = {
    "nothing": lambda c: (c.recv(1 << 16), time.sleep(9)),
    "100 Continue, again and again": lambda c: drip(c, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "an endless body": lambda c: drip(c, OK + b"Content-Length: 4611686018427387904\r\n\r\n", b"x" * 99999, 0),
    "no HTTP": lambda c: drip(c, b"220 ready\r\n", b"x"),
}
LOCATIONS = ("/ac/loop", "file:///etc/passwd", "http://127.0.0.1:1/x")
SLOW |= {
    f"a redirection to {place}": lambda c, place=place: drip(
        c, b"HTTP/1.1 302 Found\r\nContent-Length: 9\r\nLocation: " + place.encode() + b"\r\n\r\n", b"x"
    )
    for place in LOCATIONS
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", SLOW)
def test_a_store_that_is_slow_or_endless_is_a_store_without_the_entry(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "_SECONDS", 0.3)
    monkeypatch.setattr(stores, "_RATE", 10**8)
    with listening(SLOW[what]) as url:
        cache = Cache(tmp_path / "cache", remote=url, write=True)
        begin = time.monotonic()
        assert taken(cache, tmp_path) is None
        assert taken(cache, tmp_path, "1" * 64) is None, "it is not asked again"
        kept(cache, tmp_path)
        assert time.monotonic() - begin < 4
    assert caplog.text.count("is not asked again") == 1
    assert taken(cache, tmp_path) == DATA
    assert sum(path.stat().st_size for path in cache.folder.rglob("*") if path.is_file()) < 2000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["nothing", "it reads nothing"])
def test_a_store_that_takes_nothing_holds_no_build(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "_SECONDS", 0.3)
    monkeypatch.setattr(stores, "_RATE", 10**9)
    data = DATA if what != "it reads nothing" else bytes(20 << 20)
    with listening(SLOW.get(what, lambda _: time.sleep(9))) as url:
        begin = time.monotonic()
        kept(Cache(tmp_path / "cache", remote=url, write=True), tmp_path, data)
        assert time.monotonic() - begin < 4
    assert "does not take" in caplog.text
    assert taken(Cache(tmp_path / "cache"), tmp_path) == data


@pytest.mark.parametrize("size", [1 << 62, 21 << 30])
def test_an_entry_of_a_store_does_not_fill_the_disk(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = entry_text(files={"a": {"sha256": CAS, "size": size}})
    asked = list[bytes]()

    def answer(connection: socket.socket) -> None:
        asked.append(connection.recv(1 << 16).split()[1])
        if asked[-1].startswith(b"/cas/"):
            drip(connection, OK + b"\r\n", b"x" * 99999, 0)
        connection.sendall(OK + b"Content-Length: %d\r\n\r\n%s" % (len(text), text))

    with listening(answer) as url:
        assert taken(Cache(tmp_path / "cache", remote=url), tmp_path) is None
    assert asked == [b"/ac/" + KEY.encode()], "the file is not asked for"
    assert "there is no room for" in caplog.text


def test_a_url_that_cannot_be_asked_fails_no_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, url in enumerate(("http://[", "http://a:b", "http://", "http://a b/", "http://ä/é", "https://u:p@h")):
        caplog.clear()
        assert taken(Cache(tmp_path / str(number), remote=url), tmp_path) is None
        assert "does not give" in caplog.text, url


def test_files_that_are_fetched_at_the_same_time_come_to_their_own_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads have their place before either of them takes its file."""
    cache, both = Cache(tmp_path / "cache"), threading.Barrier(2)
    contents = {name: name.encode() * 9 for name in ("a", "b")}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    entry = Entry(files={name: file_of(data) for name, data in contents.items()})
    cache.keep(Kind.WEIGHTS, KEY, {name: tmp_path / name for name in contents}, entry)
    take = Cache._take

    class Held:
        def __get__(self, cache: Cache, _kind: type) -> Callable[..., bool]:
            both.wait(20)
            return partial(take, cache)

    monkeypatch.setattr(Cache, "_take", Held())
    monkeypatch.setattr(caches, "at_once", lambda work, jobs: ThreadPoolExecutor(2).map(work, jobs))
    out = tmp_path / "out"
    out.mkdir()
    assert cache.fetch(Kind.WEIGHTS, KEY, lambda name: out / name) is not None
    assert {path.name: path.read_bytes() for path in out.iterdir()} == contents
