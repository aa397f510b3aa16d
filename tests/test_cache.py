"""The build cache: what decides a key, what is taken and kept, and what a second build does not do again."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from conftest import fresh_process
from decoders import llama

import fastcar_compile as fc
from fastcar_compile import compiler
from fastcar_compile.artifact import cache as caches
from fastcar_compile.artifact import digest as digests
from fastcar_compile.artifact.cache import Cache, Entry, Kind, cache_of
from fastcar_compile.artifact.digest import FileEntry
from fastcar_compile.artifact.writer import ArtifactWriter, NotKept
from fastcar_compile.codegen.tvm import build
from fastcar_compile.config.options import asked
from fastcar_compile.frontend.checkpoint import Checkpoint
from fastcar_compile.ir.weights import LazyWeights
from fastcar_compile.support import packages

KEY, DATA = "0" * 64, b"what a build made"
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}


def file_of(data: bytes) -> FileEntry:
    return FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def kept(cache: Cache, folder: Path, data: bytes = DATA, key: str = KEY, kind: Kind = Kind.WEIGHTS) -> Path:
    """Keep one file, `a`; return its path in the folder of the cache."""
    path = folder / "made"
    path.write_bytes(data)
    cache.keep(kind, key, {"a": path}, Entry(files={"a": file_of(data)}, about=[1]), links=True)
    path.unlink()
    return cache.folder / "cas" / file_of(data).sha256


def taken(cache: Cache, folder: Path, key: str = KEY, kind: Kind = Kind.WEIGHTS) -> bytes | None:
    """Take the file `a`; None: the cache does not have it."""
    (folder / "taken_a").unlink(missing_ok=True)
    entry = cache.fetch(kind, key, lambda name: folder / f"taken_{name}", links=True)
    return None if entry is None else (folder / "taken_a").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder") / "model"
    llama(num_hidden_layers=2, **SIZES).save_pretrained(folder)
    return folder


# What decides a key.


def key_of(cache: Cache, folder: Path, board: fc.Target, **changes: Any) -> str | None:
    call = {"host_cpus": ["avx2"], "strict": False} | {
        n: changes.pop(n) for n in ("host_cpus", "strict") if n in changes
    }
    return compiler._key(cache, folder, board, asked(changes), **call)  # pyright: ignore[reportArgumentType]


def write(name: str) -> Callable[[pytest.MonkeyPatch, Path], object]:
    return lambda _patch, folder: (folder / name).write_bytes((folder / name).read_bytes() + b" ")


def installed(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "new-1.dist-info").mkdir()
    patch.syspath_prepend(folder)


def linker(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "g++").write_text("#!/bin/sh\necho another\n")
    (folder / "g++").chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=":")


BUILD: dict[str, tuple[dict[str, Any], Callable[[pytest.MonkeyPatch, Path], object] | None]] = {
    "config.json": ({}, write("config.json")),
    "weights": ({}, write("model.safetensors")),
    "another file of JSON": ({}, lambda _patch, folder: (folder / "generation_config.json").write_text("{}")),
    "target": ({"target": "kv260"}, None),
    "a field of the target": ({"target": "edited"}, None),
    "quant": ({"quant": "w4a8"}, None),
    "tokens_per_frame": ({"tokens_per_frame": 4}, None),
    "max_seq_len": ({"max_seq_len": 16}, None),
    "batch_size": ({"batch_size": 2}, None),
    "rows": ({"rows": 2}, None),
    "jacobi": ({"jacobi": fc.Jacobi(2), "rows": 8}, None),
    "prefill_chunk": ({"prefill_chunk": 2}, None),
    "engine": ({"engine": "rtl"}, None),
    "offload": ({"offload": "mlp"}, None),
    "kv": ({"kv": "float16"}, None),
    "numerics": ({"numerics": "exact"}, None),
    "strict": ({"strict": True}, None),
    "host_cpus": ({"host_cpus": ["avx2", "neon"]}, None),
    "sparse_attention": ({"sparse_attention": fc.SparseAttention(window=8)}, None),
    "no replay": ({"replay": None}, None),
    "gate": ({"replay": fc.ReplayConfig(gate="input_delta")}, None),
    "threshold": ({"replay": fc.ReplayConfig(threshold=-4)}, None),
    "the default threshold, given": ({"replay": fc.ReplayConfig(threshold=fc.ReplayConfig().threshold)}, None),
    "the CPU": ({}, lambda patch, _: patch.setattr(compiler, "cpu_flags", lambda: frozenset({"avx2"}))),
    "the machine": ({}, lambda patch, _: patch.setattr("platform.machine", lambda: "aarch64")),
    "the linker": ({}, linker),
    "what the linker reads": ({}, lambda patch, _: patch.setenv("LD_RUN_PATH", "/lib")),
    "a package": ({}, installed),
    "the sources": ({}, lambda patch, _: patch.setattr(caches, "sources_digest", lambda: "other")),
    "Python": ({}, lambda patch, _: patch.setattr("platform.python_version", lambda: "3.99.0")),
}
"""What decides a build -> options that differ, and what is done to the machine and the model folder."""


def build_key(folder: Path, cache: Cache, target: str = "zcu102", **changes: Any) -> str | None:
    board = fc.load_target("zcu102" if target == "edited" else target)
    if target == "edited":
        board = board.model_copy(update={"host": board.host.model_copy(update={"cores": 99})})
    return key_of(cache, folder, board, **changes)


@pytest.mark.parametrize("what", BUILD)
def test_a_change_of_an_input_changes_the_key_of_a_build(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "model", Cache(tmp_path / "cache")
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    before = build_key(folder, cache)
    assert before is not None
    changes, change = BUILD[what]
    if change is not None:
        change(monkeypatch, folder)
    assert build_key(folder, cache, **changes) != before


def test_every_option_of_compile_is_in_the_key() -> None:
    """A new option is either a case above, or is named as one that decides nothing."""
    cases = {name for changes, _ in BUILD.values() for name in changes}
    others = {"output", "progress", "cache"}
    assert get_type_hints(compiler.CallOptions).keys() | {"target"} == cases | others


@pytest.mark.parametrize(
    ("kind", "package"), [(kind, package) for kind, found in caches._MAKERS.items() for package in found]
)
def test_another_version_of_a_package_changes_the_keys_of_files(
    kind: Kind, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kind.key([1])
    assert kind.key([1]) == before
    assert len({before, kind.key([2]), *(other.key([1]) for other in Kind)}) == 4
    real = packages.metadata.version
    monkeypatch.setattr(packages.metadata, "version", lambda name: "9" if name == package else real(name))
    assert kind.key([1]) != before


def halved(weight: Any) -> tuple[Any]:
    return (weight / 2,)


def test_the_origin_of_a_weight_is_its_shard_and_how_it_is_made(model: Path) -> None:
    lazy, name = LazyWeights(Checkpoint(model)), "model.layers.0.mlp.up_proj.weight"

    def origin(result: str, digest: str = "0") -> Any:
        return lazy.origin(result, lambda _path: digest)

    lazy.derive(["plain"], name, halved)
    lazy.derive(["whole"], name, halved, by_rows=False)
    lazy.derive(["twice"], "plain", halved)
    lazy.derive(["other"], "model.layers.1.mlp.up_proj.weight", halved)
    lazy.derive(["first", "second"], name, halved)
    names = (name, "plain", "whole", "twice", "other", "second")
    found = {result: json.dumps(origin(result)) for result in names}
    assert len(set(found.values())) == len(names)
    assert origin("first") == origin("plain"), "the name of a result does not decide its values"
    assert all(json.dumps(origin(result, "1")) != text for result, text in found.items())
    lazy.derive(["unknown"], name, lambda weight: (weight,))
    assert origin("unknown") is None, "two lambdas have one name"


# What is taken and kept.


def test_what_is_kept_is_taken_and_stays_apart(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert taken(cache, tmp_path) is None
    kept(cache, tmp_path)
    assert taken(cache, tmp_path) == DATA
    (tmp_path / "taken_a").write_bytes(b"edited")
    assert taken(cache, tmp_path) == DATA
    assert cache.sizes() == {file_of(DATA).sha256: len(DATA)}


def unread(patch: pytest.MonkeyPatch) -> None:
    """Refuse to compute the SHA-256 of a file that is not copied."""

    def refuse(*_: object) -> Any:
        raise AssertionError("a file is read again")

    patch.setattr(digests, "blocks", refuse)


def test_a_large_file_has_two_names_and_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "LINKED", len(DATA))
    cache = Cache(tmp_path / "cache")
    path = kept(cache, tmp_path)
    assert taken(cache, tmp_path) == DATA, "its other name went: it is read"
    with monkeypatch.context() as patch:
        unread(patch)
        for number in range(2):
            cache.settle({tmp_path / "taken_a": file_of(DATA)}, cache.digests)
            (tmp_path / str(number)).mkdir()
            assert taken(Cache(cache.folder), tmp_path / str(number)) == DATA
            assert (tmp_path / str(number) / "taken_a").samefile(path)
            Cache(cache.folder).settle({tmp_path / "taken_a": file_of(DATA)}, cache.digests)
    assert not path.stat().st_mode & 0o222


def test_a_large_file_that_someone_may_write_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "LINKED", len(DATA))
    cache = Cache(tmp_path / "cache")
    path = kept(cache, tmp_path)
    assert taken(cache, tmp_path) == DATA
    (tmp_path / "taken_a").chmod(0o644)
    (tmp_path / "other").mkdir()
    assert taken(cache, tmp_path / "other") == DATA
    assert not (tmp_path / "other" / "taken_a").samefile(path)
    (tmp_path / "taken_a").write_bytes(DATA[::-1])
    assert taken(cache, tmp_path / "other") is None, "an edit of an artifact's file is damage of the kept one"
    assert not path.exists()


def test_what_is_damaged_is_refused_by_name_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path / "cache")
    path = kept(cache, tmp_path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert taken(cache, tmp_path) is None
    assert not (tmp_path / "taken_a").exists()
    assert "is damaged, and is made again" in caplog.text
    kept(cache, tmp_path)
    assert taken(cache, tmp_path) == DATA


def test_a_file_on_another_file_system_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def refuse(source: str | Path, target: Path, **options: Any) -> None:
        if not options:  # a file without a name gets one within its file system
            raise OSError("another device")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(caches, "LINKED", len(DATA))
    cache = Cache(tmp_path / "cache")
    kept(cache, tmp_path)
    assert taken(cache, tmp_path) == DATA


def test_trimming_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, keys = Cache(tmp_path / "cache"), ["a" * 64, "b" * 64, "c" * 64]
    for at, key in enumerate(keys):
        kept(cache, tmp_path, key.encode(), key)
        os.utime(cache.folder / "ac" / key, (at, at))
    assert taken(cache, tmp_path, keys[0]) == keys[0].encode()
    assert cache.trim(128) == 128
    assert list(cache.entries()) == [keys[2], keys[0]]
    assert len(cache.sizes()) == 2
    monkeypatch.setattr(caches.limits, "CACHE_BYTES", 64)
    kept(cache, tmp_path, keys[1].encode(), keys[1])
    assert (list(cache.entries()), len(cache.sizes())) == ([keys[1]], 1), "a cache does not grow without bound"


def test_a_cache_that_nobody_asked_for_fails_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write its folder, which test_cache_faults.py has refused where it is named."""
    (tmp_path / "builds").mkdir()
    (tmp_path / "builds").chmod(0o777)
    monkeypatch.setenv("FASTCAR_CACHE", str(tmp_path))
    monkeypatch.delenv("FASTCAR_NO_CACHE")
    assert cache_of(True) is None


# An HTTP store.


class Store(ThreadingHTTPServer):
    """A store in memory; `asked` are its requests."""

    def __init__(self) -> None:
        self.files, self.asked = dict[str, bytes](), list[str]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        data = self.server.files.get(self.path)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def do_PUT(self) -> None:
        self.server.asked.append(f"PUT {self.path}")
        self.server.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def store() -> Generator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_store_serves_another_machine(store: Store, tmp_path: Path) -> None:
    kept(Cache(tmp_path / "one", remote=store.url, write=True), tmp_path)
    assert store.asked == [f"PUT /cas/{file_of(DATA).sha256}", f"PUT /ac/{KEY}"]
    other = Cache(tmp_path / "two", remote=store.url)
    assert taken(other, tmp_path) == DATA
    store.files.clear()
    assert taken(other, tmp_path) == DATA, "its own folder has it now"


def test_a_store_is_read_only_and_has_no_code_by_default(store: Store, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "one", remote=store.url)
    kept(cache, tmp_path)
    assert store.asked == []
    for kind in (Kind.LIBRARY, Kind.BUILD):
        assert taken(cache, tmp_path, "1" * 64, kind) is None
        kept(Cache(tmp_path / "two", remote=store.url, write=True), tmp_path, kind=kind)
    assert store.asked == []
    allowed = Cache(tmp_path / "three", remote=store.url, libraries=True, write=True)
    kept(allowed, tmp_path, kind=Kind.LIBRARY)
    assert taken(Cache(tmp_path / "four", remote=store.url, libraries=True), tmp_path, kind=Kind.LIBRARY) == DATA


def test_weights_of_a_store_write_one_file_and_no_other(store: Store, tmp_path: Path) -> None:
    """A store that may give no code could otherwise put some beside the weights."""
    cache = Cache(tmp_path / "cache", remote=store.url)
    files = {name: file_of(DATA).model_dump() for name in ("made", "hls/fastcar_step.cpp")}
    store.files[f"/cas/{file_of(DATA).sha256}"] = DATA
    key = Kind.WEIGHTS.key("inputs")
    store.files[f"/ac/{key}"] = json.dumps({"files": files}).encode()
    with suppress(NotKept), ArtifactWriter(tmp_path / "artifact", cache) as writer:
        assert writer.made(Kind.WEIGHTS, "weights/a", "inputs", lambda path: path.write_bytes(b"mine")) == 4
        assert [path.name for path in writer.root.rglob("*") if path.is_file()] == ["a"]
        assert store.asked == [f"GET /ac/{key}"]
        raise NotKept


def test_a_store_that_lies_or_is_gone_is_a_store_without_the_entry(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept(Cache(tmp_path / "one", remote=store.url, write=True), tmp_path)
    place = f"/cas/{file_of(DATA).sha256}"
    for number, data in enumerate((DATA[:-1], DATA[:-1] + b"?", DATA * 2)):
        store.files[place] = data
        assert taken(Cache(tmp_path / f"lied to {number}", remote=store.url), tmp_path) is None
    assert "larger than it should be" in caplog.text
    store.files[f"/ac/{KEY}"] = b'{"files": {"../a": {}}}'
    assert taken(Cache(tmp_path / "misled", remote=store.url), tmp_path) is None
    gone = Cache(tmp_path / "alone", remote="http://127.0.0.1:1", write=True)
    caplog.clear()
    kept(gone, tmp_path)
    assert "does not take" in caplog.text
    assert taken(gone, tmp_path) == DATA


# Builds.


def compiled(model: Path, output: Path, cache: Cache | None, threshold: float, **changes: Any) -> fc.Artifact:
    replay = fc.ReplayConfig(gate="input_delta", threshold=threshold)
    given: dict[str, Any] = {"target": "cpu", "quant": "w8a8", "host_cpus": ["avx2"], **changes}
    return fc.compile(
        model, output=output, cache=cache, replay=replay, tokens_per_frame=4, prefill_chunk=1, **given
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cache, fc.Artifact]:
    folder = tmp_path_factory.mktemp("first")
    cache = Cache(folder / "cache")
    return cache, compiled(model, folder / "artifact", cache, 0.25)


def test_another_threshold_quantises_and_lowers_nothing(
    first: tuple[Cache, fc.Artifact], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("a second build makes it again")

    monkeypatch.setattr(build, "lower", refuse)
    monkeypatch.setattr(LazyWeights, "blocks", refuse)
    cache, before = first
    after = compiled(model, tmp_path / "artifact", cache, 0.5)
    assert after.digest != before.digest
    # onnx refuses weights with several links.
    assert {(made.path / name).stat().st_nlink for made in (before, after) for name in made.manifest.files} == {1}
    same = {n for n, file in after.manifest.files.items() if before.manifest.files.get(n) == file}
    assert {"weights/model.safetensors", "host/x86_64-linux-gnu/avx2/decoder.so"} <= same
    assert "graph/after.json" not in same
    with fc.load(after.path) as opened:
        assert opened.manifest == after.manifest


def test_an_equal_build_is_answered_with_its_warnings(
    first: tuple[Cache, fc.Artifact], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, before = first
    monkeypatch.setitem(sys.modules, "fastcar_compile.phases", None)
    assert compiled(model, tmp_path / "artifact", cache, 0.25).digest == before.digest
    with fc.load(tmp_path / "artifact") as opened:
        assert opened.digest == before.digest
    noted = Cache(tmp_path / "noted")
    key = key_of(noted, model, fc.load_target("cpu"))
    assert key is not None
    paths = {name: before.path / name for name in (*before.manifest.files, "manifest.json")}
    files = {name: file_of(path.read_bytes()) for name, path in paths.items()}
    noted.keep(Kind.BUILD, key, paths, Entry(files=files, about=[["it is so", False]]))
    with pytest.warns(UserWarning, match="it is so") as caught:
        assert compiler._answer(noted, key, tmp_path / "answered") is not None
    assert len(caught) == 1


def test_a_command_is_answered_before_torch_is_imported(
    first: tuple[Cache, fc.Artifact], model: Path, tmp_path: Path
) -> None:
    cache, before = first
    words = ["compile", str(model), "--target", "cpu", "--quant", "w8a8", "--tokens-per-frame", "4"]
    words += ["--prefill-chunk", "1", "--host-cpus", "avx2", "--gate", "input_delta", "--threshold", "0.25", "--json"]
    words += ["--cache", str(cache.folder), "-o", str(tmp_path / "artifact")]
    code = "import sys; from fastcar_compile.cli import main\ntry: main()\n"
    code += "finally: print(sorted({'torch', 'tvm', 'transformers'} & set(sys.modules)))"
    found, imported = fresh_process("-c", code, *words).strip().rsplit("\n", 1)
    assert json.loads(found)["digest"] == before.digest
    assert imported == "[]"


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["cpu", "zcu102"])
def test_a_build_from_the_cache_has_the_bytes_of_one_without(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "LINKED", 1024)
    model, cache = tmp_path / "model", Cache(tmp_path / "cache")
    llama(num_hidden_layers=2, **SIZES | {"hidden_size": 64}).save_pretrained(model)  # heads that zcu102 computes, too
    given = {"target": target, "offload": "all" if target == "zcu102" else None}
    compiled(model, tmp_path / "first", cache, 0.25, **given)
    one, other = (compiled(model, tmp_path / str(c is None), c, 0.5, **given) for c in (cache, None))
    assert one.digest == other.digest
    links = {name for name in one.manifest.files if (one.path / name).samefile(tmp_path / "first" / name)}
    shared = {"weights/model.safetensors", "weights/accelerator.safetensors"} if target == "zcu102" else set[str]()
    assert shared <= links
    assert bool(shared) == bool(links)


# The command.
