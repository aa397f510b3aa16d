"""An artifact for GPU and WebAssembly in Chromium, whose WebGPU adapter is SwiftShader: one page, one browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from inspection.browser import browsing, chromium
from play.worlds import FRAME, write_world
from web.test_page import served, written

import fastcar_compile as fc
from fastcar_play.world import load_world

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")
PROMPT, COUNT = [1, 5, 9], 2 * FRAME + 2
TOLERANCE = 0.01
"""Of logits of about 0.4: SwiftShader divides less exactly than a CPU, which moves an activation by a step of int8."""

DECODED = """
async ([prompt, count]) => {
  const { load, Sampler } = await import("./fastcar.mjs");
  const artifact = await load(new URL("artifact/", location.href), { device: "gpu" });
  const [session, other] = [artifact.session(), artifact.session()];
  other.setThreshold(null);
  const [logits, reads] = [[Array.from(await session.prefill(prompt))], []];
  const choose = (row, position) => new Sampler({ temperature: 0 }).choose(row, position);
  const tokens = [choose(logits[0], 0)];
  await other.prefill(prompt);
  await other.step(tokens[0]); // sessions share the weights, and nothing else
  const each = (session, row) => logits.push(Array.from(row)) && reads.push(Array.from(session.decisions, Number));
  tokens.push(...(await session.decode(tokens, count - 1, choose, [], each)));
  const sampler = new Sampler({ temperature: 0.7, topK: 5, seed: 3 });
  const ways = []; // the GPU draws; the host does
  for (const choose of [sampler.among(1, 12), (...given) => sampler.among(1, 12)(...given)]) {
    const [own, rows] = [artifact.session(), []];
    await own.prefill(prompt);
    const each = ({ decisions }, row) => rows.push([...row, ...decisions]);
    ways.push([await own.decode([3, 4], count, choose, [], each), rows, own.position, own.steps, own.replays]);
    own.close();
  }
  const lost = async () => { artifact.decoder.device.destroy(); await session.step(1); };
  const refused = await lost().catch(String);
  return { device: artifact.device, tokens, logits, reads, dense: other.replays, ways, refused };
}
"""
SAID = """
async () => {
  const { load } = await import("./fastcar.mjs");
  const url = new URL("artifact/", location.href);
  const told = [({ device, notice }) => [device, notice], (error) => ["", String(error)]];
  const said = async (device) => load(url, { device }).then(...told);
  const found = { software: await said("auto"), cpu: await said("cpu") };
  const small = { info: {}, limits: { maxBufferSize: 1024, maxStorageBufferBindingSize: 1024 } };
  for (const [name, adapter] of [["none", null], ["small", small]]) {
    Object.defineProperty(navigator.gpu, "requestAdapter", { value: async () => adapter, configurable: true });
    [found[`${name} auto`], found[`${name} gpu`]] = [await said("auto"), await said("gpu")];
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def folder(artifact: fc.Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the tiny world, whose worker takes a software adapter for a GPU."""
    page = tmp_path_factory.mktemp("gpu") / "page"
    done = written(artifact, load_world(write_world(page.with_name("world"))), page)
    assert done.exit_code == 0, done.output
    (page / "empty.html").write_text('<link rel="icon" href="icon.svg" />')
    (page / "worker.js").write_text(
        "Object.defineProperty(GPUAdapterInfo.prototype, 'isFallbackAdapter', { value: false });\n"
        "const { requestDevice } = GPUAdapter.prototype;\n"
        "GPUAdapter.prototype.requestDevice = async function (...given) {\n"
        "  return (self.opened = await requestDevice.apply(this, given));\n"
        "};\n" + (page / "worker.js").read_text()
    )
    return page


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium(*FLAGS) as own:
        yield own


@pytest.fixture
def page(url: str, browser: "Browser") -> Iterator["Page"]:
    """A page of the server that is not the game's."""
    with browsing(url, browser=browser) as (page,):
        page.goto(f"{url}empty.html")
        yield page


def test_tokens_and_decisions_are_those_of_the_cpu(artifact: fc.Artifact, page: "Page") -> None:
    """Logits within the tolerance, draws on the GPU as on the host; without a CPU to go on with, a loss is an error."""
    found: dict[str, Any] = page.evaluate(DECODED, [PROMPT, COUNT])
    session = artifact.session(record=True)
    logits = [session.prefill(np.array([PROMPT]))]
    for _ in range(COUNT - 1):
        logits.append(session.step(logits[-1].argmax(-1)))
    reads = session.stats.decisions[..., 0].astype(int).tolist()
    assert found["device"] == "gpu"
    assert found["tokens"] == [int(row.argmax()) for row in logits]
    assert found["reads"] == reads
    assert 0 < np.mean(reads) < 1
    assert found["dense"] == 0
    np.testing.assert_allclose(found["logits"], np.concatenate(logits), atol=TOLERANCE)
    assert found["ways"][0] == found["ways"][1]
    assert len({*found["ways"][0][0]}) > 3
    assert found["refused"] == "Error: the GPU is lost: Device was destroyed"


def test_where_no_gpu_decodes_a_sentence_says_why(page: "Page") -> None:
    found = page.evaluate(SAID)
    none, small = "WebGPU finds no GPU", "the decoder needs maxBufferSize"
    software = f"{none} but a software adapter, which is slower"
    assert found["cpu"] == ["cpu", None]
    assert found["software"] == ["cpu", f"The CPU decodes: {software}."]
    assert found["none auto"] == ["cpu", f"The CPU decodes: {none}."]
    assert found["none gpu"] == ["", f"Error: {none}"]
    for device, text in (found["small auto"], found["small gpu"]):
        assert small in text
        assert ", and the GPU has 1024" in text
        assert device == ("cpu" if text.startswith("The CPU decodes: ") else "")


def test_a_game_goes_on_where_the_gpu_is_lost(url: str, browser: "Browser") -> None:
    """From its last frame, on the CPU; the page shows what decodes, and why."""
    with browsing(url, browser=browser) as (page,):
        page.goto(url)
        page.wait_for_selector("body[data-state=paused]")
        assert page.inner_text("#device") == "GPU"
        page.get_by_label("Replay", exact=True).check()
        page.uncheck("#limit")
        page.click("#cover")
        page.wait_for_function("Number(document.body.dataset.frame) >= 2")
        page.workers[0].evaluate("opened.destroy()")
        last = int(page.get_attribute("body", "data-frame") or 0) + 8
        page.wait_for_function(f"Number(document.body.dataset.frame) >= {last}")
        assert page.get_attribute("body", "data-state") == "playing"
        assert page.inner_text("#device") == "CPU"
        said = "The CPU decodes: the GPU is lost: Device was destroyed."
        assert page.get_attribute("#device", "title") == said
        assert page.inner_text("#note") == said
