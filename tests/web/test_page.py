"""The page as a folder: any file server is enough, and the browser generates the frames."""

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnxruntime
import pytest
from conftest import check_module, check_tool
from inspection.browser import browsing
from onnx import TensorProto, helper
from play.worlds import write_world
from typer.testing import CliRunner, Result

import fastcar_compile as fc
from fastcar_compile.cli.commands import app
from fastcar_compile.errors import CompileError
from fastcar_play.lockstep import RecordedGame, load_game, verify
from fastcar_play.onnx_library import write_onnx_library
from fastcar_play.page import write_page
from fastcar_play.pixels import Pixels
from fastcar_play.world import World, load_world

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def world(tmp_path: Path) -> World:
    return load_world(write_world(tmp_path / "world"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a file server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def written(artifact: fc.Artifact, world: World, folder: Path) -> Result:
    """What the command says that writes a page."""
    words = ["play", artifact.path, "--world", world.folder, "--static", folder, "--threads", "1", "--json"]
    return CliRunner().invoke(app, [str(word) for word in words])


def saved(page: "Page") -> RecordedGame:
    """The game that a page plays."""
    with page.expect_download() as download:
        page.click("#record")
    return load_game(download.value.path())


@pytest.mark.parametrize(
    ("instruction_set", "text"),
    [
        ("avx2", "has no library for WebAssembly\n.*\n.*compile it for wasm32"),
        ("wasm-simd128", "has no program that reads prompts\n.*\n.*with a prefill_chunk above 1"),
    ],
)
def test_what_a_page_lacks_is_said_before_it_is_written(tmp_path: Path, instruction_set: str, text: str) -> None:
    variant = Namespace(instruction_set=instruction_set, programs=Namespace(library="decoder.wasm", prefill=None))
    artifact: Any = Namespace(path=tmp_path, manifest=Namespace(host=Namespace(variants=[variant])))
    with pytest.raises(fc.InputError, match=text):
        write_page(artifact, cast("Any", None), tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_the_browser_plays_by_itself(artifact: fc.Artifact, world: World, tmp_path: Path) -> None:
    """Side by side at first, with the pixels of the world's model; then dense with a key that is held.

    The page is told of drafts, whose weights it takes off what replay spares.
    """
    done = written(artifact, world, tmp_path / "page")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "page").rglob("*") if path.is_file())
    facts = tmp_path / "page" / "page.json"
    facts.write_text(facts.read_text().replace('"spared": [1.0, 1.0]', '"spared": [0.5, 0.5]'))
    with served(tmp_path / "page") as url, browsing(url) as (page,):
        page.goto(url)
        page.wait_for_selector("body[data-frame='0'][data-state=paused]")
        assert "a draft with 50 % of its weights, and its output" in page.inner_text(".about")
        data = page.eval_on_selector("canvas.image", "c => [...c.getContext('2d').getImageData(0, 0, 2, 2).data]")
        shown = np.array(data, np.uint8).reshape(2, 2, 4)[..., :3]
        assert (shown == Pixels(world, 1)(world.starts[0, -1, 1:] - 1)).all()
        assert page.locator("figcaption").all_inner_texts() == ["Dense", "Replay"]
        assert not page.is_checked("#heat")
        page.click("#cover")
        page.wait_for_function("Number(document.body.dataset.frame) >= 20")  # more than the decoder has positions
        game = saved(page)
        assert len(game.checks) >= 20
        assert 0 < verify(artifact, world, game) < 1
        read = "['share', 'spared'].map((id) => parseInt(document.getElementById(id).textContent))"
        page.wait_for_function(f"(([share, spared]) => spared > 0 && Math.abs(spared - share / 2) < 1)({read})")
        page.get_by_label("Dense", exact=True).check()
        page.click("#record")
        answered = "document.getElementById('note').textContent.includes('Start a new game')"
        page.wait_for_function(answered)
        last = int(page.get_attribute("body", "data-frame") or 0) + 13
        page.wait_for_function(f"Number(document.body.dataset.frame) >= {last}")  # a context later
        assert page.evaluate(answered)
        page.keyboard.down("Space")
        page.wait_for_function("document.getElementById('parts').textContent.includes('shoot')")
        assert page.locator("figure").count() == 1


STUB = """
window.Worker = class extends EventTarget {
  postMessage(message) {}
  constructor() {
    super();
    window.tell = (...data) => this.dispatchEvent(new MessageEvent("message", { data }));
  }
};
"""
FRAME = """
([number, times, codes]) => {
  const known = { sampling_ms: 0, kind: "rgba", bytes: 36, replayed: [0, 0, 0], by_layer: [1], accepted: 3.58 };
  const names = ["dense", "replay"].slice(-times.length);
  const sides = names.map((side, i) => ({ ...known, side, codes: codes[i], token_ms: times[i] }));
  const header = { action: "up", png_ms: 0, pixels_ms: 0, fps: 1, refilled: false, recorded: null };
  tell({ ...header, type: "frame", serial: number, number, sides }, new Uint8Array(36 * times.length));
}
"""
MARKED = """
canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 2, 96, 1);
  return [2, 34, 66].map((x) => data[4 * x + 3] > 0);
}
"""


def test_what_the_shipped_page_says_of_the_game(crafter_page: Path) -> None:
    """Given frames in the place of a decoder's: their speed is smoothed, and tiles that differ are marked."""
    hello = json.loads((crafter_page / "page.json").read_text())["hello"]
    hello |= {"size": [1, 9], "grid": [1, 3], "aspect": [3, 1], "spared": [1.0], "levels": [None, -2.0, -1.0]}
    status = {"type": "status", "running": True, "mode": "both", "threshold": "compiled", "start": 0, "seed": 0}
    status |= {"temperature": 1, "top_k": 0, "limited": True, "recorded": None, "note": ""}
    with served(crafter_page) as url, browsing(url) as (page,):
        page.add_init_script(STUB)
        page.goto(url)
        page.wait_for_function("window.tell !== undefined")

        def told(**changes: Any) -> None:
            status.update(changes)
            page.evaluate("status => tell(status)", status)

        def frames(*times: list[float], codes: list[list[int]]) -> None:
            for number, each in enumerate(times, 1):
                page.evaluate(FRAME, [number, each, codes])
            page.wait_for_selector(f"body[data-frame='{len(times)}']")

        page.evaluate("hello => tell(hello)", hello)
        told()
        frames([1.6, 1.0], [160.0, 1.0], [0.4, 0.25], codes=[[5, 6, 7], [5, 9, 7]])
        assert page.inner_text(".tiles div:has(#token-ms)").split("\n") == ["replay is", "1.6x as fast"]
        assert page.inner_text("#accepted") == "3.6 tokens a step"
        assert (
            page.inner_text("#seen")
            == "Same keys, same draws. Left: all is computed. Right: replay. ◤ 1 of 3 tiles differ."
        )
        for side in range(2):
            assert page.locator("canvas.marks").nth(side).evaluate(MARKED) == [False, True, False]

        assert page.get_attribute("#threshold", "aria-valuetext") == "as compiled, layer by layer"
        told(threshold=-2.0)  # also where another window has set it
        assert page.input_value("#threshold") == "1"
        told(threshold=None)
        assert (page.input_value("#threshold"), page.inner_text("#threshold-text")) == ("0", "never")
        told(mode="replay")
        frames([0.25], [9.0], [0.26], codes=[[5, 6, 7]])
        assert page.inner_text(".tiles div:has(#token-ms)").split("\n") == ["ms / token", "0.26"]
        assert (
            page.inner_text("#seen")
            == "A neural network makes every frame from your keys, and replay skips parts of it."
        )
        assert page.locator("canvas.marks").evaluate(MARKED) == [False] * 3


@pytest.mark.thorough
def test_windows_play_one_game(artifact: fc.Artifact, world: World, tmp_path: Path) -> None:
    """Others join late, their keys count, and they go on when the first is closed. A frame with other bits ends all."""
    assert written(artifact, world, tmp_path / "page").exit_code == 0
    with served(tmp_path / "page") as url, browsing(url, pages=3) as (first, second, third):
        for page in (first, second, third):
            page.goto(url)
            page.wait_for_selector("body[data-state=paused]")
            assert "short cut will do: its output of the frame before." in page.inner_text(".about")
            page.check("#together")
            if page is first:
                page.click("#cover")
            page.wait_for_function("Number(document.body.dataset.frame) >= 20")
        second.keyboard.down("Space")
        first.wait_for_function("document.getElementById('parts').textContent.includes('shoot')")
        second.click("#run")
        first.wait_for_selector("body[data-state=paused]")
        game = saved(first)
        for page in (second, third):
            while len(saved(page).checks) < len(game.checks):
                pass
            assert saved(page) == game
        assert 0 < verify(artifact, world, game) < 1
        first.close()
        third.click("#cover")
        for page in (second, third):
            page.wait_for_function(f"Number(document.body.dataset.frame) > {len(game.checks)}")
        third.click("#run")
        second.wait_for_selector("body[data-state=paused]")
        while len((game := saved(second)).checks) != len(saved(third).checks):
            pass
        forged = {"type": "frame", "number": len(game.checks) + 1, "token": 0, "digest": "0" * 64}
        say = "([name, message]) => new BroadcastChannel(name).postMessage(message)"
        second.evaluate(say, [f"fastcar play {game.weights}", forged])
        for page in (second, third):
            page.wait_for_selector("body[data-state=ended]")
            assert "has other bits than in another window" in page.inner_text("#cover-hint")


def convolutions(**attributes: Any) -> bytes:
    """x float32 [1, 3, 5, 6] -> y: 3 x 3 with a border, a bias, and 1 x 1."""
    draw = np.random.default_rng(2).standard_normal
    weights = {"w": draw((4, 3, 3, 3)), "b": draw(4), "v": draw((2, 4, 1, 1))}
    tensors = [
        helper.make_tensor(n, TensorProto.FLOAT, v.shape, v.astype(np.float32).ravel()) for n, v in weights.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"], pads=[1, 1, 1, 1], **attributes),
        helper.make_node("Conv", ["h", "v"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", [1, 3, 5, 6]), ("y", [1, 2, "high", "wide"]))
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return model.SerializeToString()


RUN = """
const [file, bytes] = [process.argv[1], JSON.parse(process.argv[2])];
const { instance } = await WebAssembly.instantiate((await import("node:fs")).readFileSync(file), {});
const { memory, fastcar_allocate: take, main } = instance.exports;
const [table, x] = [take(8), take(bytes.length * 4)];
new Float32Array(memory.buffer, x, bytes.length).set(bytes);
new Uint32Array(memory.buffer, table, 1)[0] = x;
main(table, table + 4);
console.log(JSON.stringify([...new Float32Array(memory.buffer, new Uint32Array(memory.buffer, table + 4, 1)[0], 60)]));
"""


@pytest.mark.thorough
def test_convolutions_of_an_onnx_model(tmp_path: Path) -> None:
    check_module("ziglang")
    write_onnx_library(convolutions(), {"x": (1, 3, 5, 6)}, tmp_path / "model.wasm")
    x = np.random.default_rng(4).standard_normal((1, 3, 5, 6)).astype(np.float32)
    command = [
        check_tool("node"),
        "--input-type=module",
        "-e",
        RUN,
        tmp_path / "model.wasm",
        json.dumps(x.ravel().tolist()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    session = onnxruntime.InferenceSession(convolutions(), providers=["CPUExecutionProvider"])
    expected = np.asarray(session.run(["y"], {"x": x})[0])
    np.testing.assert_allclose(
        np.array(json.loads(done.stdout)).reshape(expected.shape), expected, rtol=1e-5, atol=1e-5
    )
    with pytest.raises(CompileError, match="changes the size of its image"):
        write_onnx_library(convolutions(strides=[2, 2]), {"x": (1, 3, 5, 6)}, tmp_path / "strided.wasm")
