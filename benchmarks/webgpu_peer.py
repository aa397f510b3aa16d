"""Milliseconds of a decode step in Chromium on SwiftShader: the GPU program beside onnxruntime-web's WebGPU backend.

    npm pack onnxruntime-web && tar xzf onnxruntime-web-*.tgz
    python benchmarks/webgpu_peer.py --peer package/dist

The decoder is Crafter's in float32, dense, as its decoder.onnx has it. Both read the same tokens by turns on one
adapter, and keep keys and values on the GPU; the likeliest next tokens have to be equal. A
software adapter says nothing of a GPU's time.
"""

import argparse
import statistics
import tempfile
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from webgpu import FLAGS, Quiet

import fastcar_compile as fc
from fastcar_compile.artifact.layout import WEB_MODULES

EXAMPLES = Path(__file__).parents[1] / "examples"
LENGTH, WARM = 256, 4

PAGE = """<!doctype html><script type="module">
import * as ort from "./peer/ort.webgpu.min.mjs";
import { load } from "./artifact/MODULE";
Object.assign(ort.env.wasm, { numThreads: 1, wasmPaths: "/peer/" });
const read = async (name) => new Uint8Array(await (await fetch(`/artifact/${name}`)).arrayBuffer());
const likeliest = (logits) => logits.indexOf(logits.reduce((a, b) => Math.max(a, b)));
async function timed(count, step) {
  const [times, tokens] = [[], []];
  for (let i = 0; i < count; i++) {
    const begin = performance.now();
    tokens.push(likeliest(await step((7 * i) % 50, i)));
    times.push(performance.now() - begin);
  }
  return { times, tokens };
}
const int64 = (value, shape) => new ort.Tensor("int64", BigInt64Array.of(BigInt(value)), shape);
const SIZES = STATES, path = "weights/model.safetensors";
const session = await ort.InferenceSession.create(await read("decoder.onnx"), {
  executionProviders: ["webgpu"], externalData: [{ path, data: await read(path) }],
  preferredOutputLocation: Object.fromEntries(Object.keys(SIZES).map((name) => [`${name}_out`, "gpu-buffer"])),
});
const artifact = await load(new URL("/artifact/", location.href), { device: "gpu" });
window.peer = (count) => {
  const state = Object.fromEntries(Object.entries(SIZES).map(([name, shape]) =>
    [name, new ort.Tensor("float32", new Float32Array(shape.reduce((a, b) => a * b)), shape)]));
  return timed(count, async (token, place) => {
    const found = await session.run({ ...state, tokens: int64(token, [1, 1]), position: int64(place, [1]) });
    for (const name in state) state[name] = found[`${name}_out`];
    return found.logits.getData();
  });
};
window.own = (count) => {
  const session = artifact.session();
  return timed(count, async (token, place) => {
    const logits = await (place === 0 ? session.prefill([token]) : session.step(token));
    return logits.flat ? logits.flat() : logits;
  });
};
</script>"""


def main() -> None:
    """Print medians and their ratio; fail where the tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="the folder dist of the npm package onnxruntime-web")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact = fc.compile(
            EXAMPLES / "crafter" / "world" / "decoder",
            "webgpu",
            replay=None,
            max_seq_len=LENGTH,
            output=folder / "artifact",
        )
        (folder / "peer").symlink_to(given.peer.resolve())
        states = {state.name: list(state.shape) for state in artifact.state}
        text = PAGE.replace("STATES", str(states)).replace("MODULE", next(m for m in WEB_MODULES if "fastcar" in m))
        (folder / "index.html").write_text(text, "utf-8")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
        Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as play:
            page = play.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS).new_page()
            page.set_default_timeout(600_000)
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_function("window.own")
            times, tokens = dict[str, list[float]](own=[], peer=[]), list[list[int]]()
            for _ in range(given.rounds):
                for side in times:
                    found = page.evaluate(f"{side}({given.steps})")
                    times[side] += found["times"][WARM:]
                    tokens.append(found["tokens"])
        server.shutdown()
    own, peer = (statistics.median(times[side]) for side in ("own", "peer"))
    print(f"ms a step: fastcar.mjs {own:.1f}, onnxruntime-web {peer:.1f}: {peer / own:.2f}x; tokens {tokens[0][:8]} …")
    assert all(other == tokens[0] for other in tokens), "the tokens differ"


if __name__ == "__main__":
    main()
