"""Time and bytes of two layers of 2048 x 6144 on a GPU adapter: dense, replayed, and with the decisions read back.

    python benchmarks/webgpu.py                # w8a8, the adapter that the package wgpu finds
    python benchmarks/webgpu.py --rounds 5
    python benchmarks/webgpu.py --artifact ARTIFACT --world WORLD --frames 10   # in Chromium against the backend cpu

Every round measures the three by turns, and the median of the rounds is printed. A software adapter says nothing about
a GPU's time; dispatches and bytes are those of every adapter.

With --artifact, Chromium on SwiftShader reads the tokens that the backend cpu draws in a world, so that one other token
does not make all behind it others: compared are logits, the tokens that each would draw, and decisions.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.artifact.layout import GPU_PROGRAM
from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.codegen.tvm.gpu.program import program_of
from fastcar_compile.config import CompileConfig
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.pipeline import analysis_pipeline, rewrite_pipeline
from fastcar_compile.runtime.backends.webgpu import GpuDevice, WebGpuStepper, finite
from fastcar_compile.runtime.sampling import Sampling
from fastcar_play.world import World, load_world

LAYERS, WIDTH, INNER, FRAME = 2, 2048, 6144, 4


def stepper(quant: str) -> tuple[WebGpuStepper, Mapping[str, Any]]:
    """Return a session of random weights, and its program."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "vocab_size": 64,
    }
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    config = CompileConfig(
        target="webgpu", quant=quant, kv="int8", batch_size=1, max_seq_len=64, tokens_per_frame=FRAME,
        replay=fc.ReplayConfig(threshold=0.0),
    )  # fmt: skip
    program = capture(model, batch_size=1, max_seq_len=64, tokens_per_frame=FRAME, prefill_chunk=1, rows=None)
    program = run_pipeline(program, analysis_pipeline())
    program = run_pipeline(program, rewrite_pipeline(config, len(program.sites)))
    made = program_of(HostGraph(program.copied().graph_module, program.outputs))
    params = {name: tensor.detach().numpy() for name, tensor in program.params.items()}
    return WebGpuStepper(GpuDevice(), made, decoder_section(program), params), made


def read_back(own: WebGpuStepper, program: Mapping[str, Any]) -> None:
    """Run a decode step as a host runs it that reads each layer's decision, and submits one branch only."""
    device = own._device.device
    encoder = device.create_command_encoder()
    compute = encoder.begin_compute_pass()
    decided = dict[tuple[int, int], int]()
    for call, dispatch in zip(own._calls, program["dispatches"], strict=True):
        buffer, word, wanted = dispatch.get("when", (None, None, None))
        if buffer is not None and (buffer, word) not in decided:
            compute.end()
            device.queue.submit([encoder.finish()])
            found = device.queue.read_buffer(own._buffers[buffer], 4 * word, 4)
            decided[buffer, word] = int(np.frombuffer(found, np.int32)[0])
            encoder = device.create_command_encoder()
            compute = encoder.begin_compute_pass()
        if buffer is None or decided[buffer, word] == wanted:
            pipeline, group, groups, _ = call
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*groups)
    compute.end()
    own._read_back(encoder)


def weight_bytes(program: Mapping[str, Any], branch: int, weights: set[str]) -> int:
    """Return the bytes of weights that a decode step binds whose conditions all are `branch`."""
    used = {b for d in program["dispatches"] if d.get("when", [0, 0, branch])[2] == branch for b in d["buffers"]}
    buffers = program["buffers"]
    kinds = {"constant", "parts"}
    return sum(4 * buffers[b]["words"] for b in used if buffers[b].get("name") in weights or kinds & buffers[b].keys())


FLAGS = ("--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")

READ = """
async ([prompt, tokens, length]) => {
  const { load, Sampler } = await import("./host/src/fastcar.mjs");
  const session = (await load(new URL(".", location.href), { device: "gpu" })).session();
  const [logits, decisions] = [[Array.from(await session.prefill(prompt))], []];
  const start = performance.now();
  const each = ({ decisions: own }, row) => logits.push(Array.from(row)) && decisions.push(Array.from(own, Number));
  const choose = new Sampler().among(0, session.config.vocab_size);
  for (let i = 0; i < tokens.length; i += length) {
    await session.decode(tokens.slice(i, i + length), 1, choose, [], each);
  }
  return { logits, decisions, ms: (performance.now() - start) / tokens.length };
}
"""


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing of requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def in_chromium(folder: Path, prompt: list[int], tokens: list[int], length: int) -> dict[str, Any]:
    """Return logits, decisions and milliseconds a step of an artifact in Chromium, frames of `length` tokens."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    with server, sync_playwright() as playwright:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/manifest.json")
        found = page.evaluate(READ, [prompt, tokens, length])
        browser.close()
        server.shutdown()
    return found


def played(artifact: fc.Artifact, world: World, frames: int, context: int) -> tuple[list[int], list[int], Any, Any]:
    """Return the prompt, the tokens that the backend cpu reads behind it, its logits and its decisions."""
    length = world.file.tokens_per_frame
    prompt = world.starts[0, -context:].ravel().tolist()
    session, tokens = artifact.session(record=True), list[int]()
    choose = drawer(world)
    logits = [session.prefill(np.array([prompt]))[0]]
    for i in range(frames * length):
        known = i % length == 0
        action = world.file.actions[i // length % len(world.file.actions)].token
        tokens.append(action if known else choose(logits[-1], len(prompt) + i - 1))
        logits.append(session.step(np.array([tokens[-1]]))[0])
    return prompt, tokens, np.stack(logits), session.stats.decisions[..., 0]


def drawer(world: World) -> Callable[[Any, int], int]:
    """Return what draws an image token of a world, by its own sampling, from the logits behind a position."""
    image, sampling = world.file.image, world.file.sampling
    drawn = Sampling(sampling.temperature, sampling.top_k or None, exact=True).start(np.zeros((1, 0), int))

    def choose(row: Any, position: int) -> int:
        return int(drawn(row[None, image.offset : image.offset + image.count], position)[0]) + image.offset

    return choose


def compare(folder: Path, world: World, frames: int, context: int) -> None:
    """Print what an artifact in Chromium gives beside the backend cpu."""
    artifact = fc.load(folder)
    prompt, tokens, logits, decisions = played(artifact, world, frames, context)
    length = world.file.tokens_per_frame
    found = in_chromium(folder, prompt, tokens, length)
    own, choose = np.array(found["logits"], np.float32), drawer(world)
    places = [i for i in range(len(tokens)) if i % length]  # whose token is drawn and not an action
    other = [i for i in places if choose(own[i], len(prompt) + i - 1) != tokens[i]]
    differing = int((np.array(found["decisions"], bool) != decisions).sum())
    first = f"the first one token {other[0] % length} of frame {other[0] // length + 1}" if other else "none differs"
    print(f"{world.file.name}: {frames} frames behind {len(prompt)} tokens, {found['ms']:.0f} ms a step on SwiftShader")
    print(f"tokens equal: {1 - len(other) / len(places):.2%} of {len(places)}; {first}")
    print(f"largest logit difference: {np.abs(own - logits).max():.3g}, of logits up to {np.abs(logits).max():.3g}")
    print(f"decisions that differ: {differing} of {decisions.size}; {decisions.mean():.1%} replayed")
    program = json.loads(bytes(artifact.files.data(GPU_PROGRAM)))
    dense, replayed = (weight_bytes(program, branch, set(artifact.arrays())) / 1e6 for branch in (0, 1))
    count, conditional = len(program["dispatches"]), sum("when" in d for d in program["dispatches"])
    print(f"{count} dispatches a decode step of {artifact.config.num_layers} layers, {conditional} of MLPs")
    print("one submit and one round trip a frame")
    print(f"{dense:.2f} MB of weights bound by a dense step, {replayed:.2f} MB where all MLPs replay")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", default="w8a8", choices=["none", "w8a8", "w4a8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--artifact", type=Path, help="compiled for webgpu: compare Chromium with the backend cpu")
    parser.add_argument("--world", type=Path, help="of the artifact")
    parser.add_argument("--frames", type=int, default=10)
    parser.add_argument("--context", type=int, default=2, help="frames of the world's start that the decoder reads")
    given = parser.parse_args()
    if given.artifact is not None:
        compare(given.artifact, load_world(given.world), given.frames, given.context)
        return
    own, program = stepper(given.quant)
    token, never, always = np.array([[1]]), *(np.full(LAYERS, v, np.float32) for v in (np.inf, -np.inf))
    for i in range(FRAME):
        own.decode(token, i, i, never)

    def step(thresholds: Any) -> Callable[[], Any]:
        return lambda: own.decode(token, FRAME, FRAME, thresholds)

    def host(thresholds: Any) -> Callable[[], Any]:
        def run() -> None:
            place = own._inputs["thresholds"]
            own._device.write(own._buffers[place], finite(thresholds))
            read_back(own, program)

        return run

    weights = {
        facts["name"] for place, facts in enumerate(program["buffers"]) if place in own._shared and "name" in facts
    }
    dense, replayed = (weight_bytes(program, branch, weights) for branch in (0, 1))
    cases = {
        "dense, counts on the GPU": (step(never), dense),
        "replayed, counts on the GPU": (step(always), replayed),
        "dense, decisions read back": (host(never), dense),
        "replayed, decisions read back": (host(always), replayed),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(given.rounds):
        for name, (run, _) in cases.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    count = len(program["dispatches"])
    print(f"adapter {own._device.name}; {given.quant}; {LAYERS} layers of {WIDTH} x {INNER}; {count} dispatches a step")
    print(f"{'':31}{'ms':>9}{'weights MB':>12}")
    for name, (_, size) in cases.items():
        print(f"{name:31}{1e3 * statistics.median(times[name]):9.1f}{size / 1e6:12.1f}")


if __name__ == "__main__":
    main()
