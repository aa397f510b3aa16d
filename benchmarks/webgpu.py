"""Time and bytes of two layers of 2048 x 6144 on a GPU adapter: dense, replayed, and with the decisions read back.

    python benchmarks/webgpu.py                # w8a8, the adapter that the package wgpu finds
    python benchmarks/webgpu.py --rounds 5

Every round measures the three by turns, and the median of the rounds is printed. A software adapter says nothing about
a GPU's time; dispatches and bytes are those of every adapter.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.codegen.tvm.gpu.program import program_of
from fastcar_compile.config import CompileConfig
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.pipeline import analysis_pipeline, rewrite_pipeline
from fastcar_compile.runtime.backends.webgpu import GpuDevice, WebGpuStepper

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
    decided = dict[int, int]()
    for call, dispatch in zip(own._calls, program["dispatches"], strict=True):
        when = dispatch.get("when")
        if when is not None and when[0] not in decided:
            compute.end()
            device.queue.submit([encoder.finish()])
            decided[when[0]] = int(np.frombuffer(device.queue.read_buffer(own._buffers[when[0]]), np.int32)[0])
            encoder = device.create_command_encoder()
            compute = encoder.begin_compute_pass()
        if when is None or decided[when[0]] == when[1]:
            pipeline, group, groups, _ = call
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*groups)
    compute.end()
    own._read_back(encoder)


def weight_bytes(own: WebGpuStepper, program: Mapping[str, Any], branches: tuple[int, ...]) -> int:
    """Return the bytes of weights that a decode step reads whose conditions are among `branches`."""
    used = {b for d in program["dispatches"] if d.get("when", [0, branches[0]])[1] in branches for b in d["buffers"]}
    return sum(4 * program["buffers"][b]["words"] for b in used if b in own._shared)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", default="w8a8", choices=["none", "w8a8", "w4a8"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    own, program = stepper(given.quant)
    token, never, always = np.array([[1]]), *(np.full(LAYERS, v, np.float32) for v in (np.inf, -np.inf))
    for i in range(FRAME):
        own.decode(token, i, i, never)

    def step(thresholds: Any) -> Callable[[], Any]:
        return lambda: own.decode(token, FRAME, FRAME, thresholds)

    def host(thresholds: Any) -> Callable[[], Any]:
        def run() -> None:
            place = own._inputs["thresholds"]
            own._device.write(own._buffers[place], thresholds)
            read_back(own, program)

        return run

    dense, replayed = (weight_bytes(own, program, (branch,)) for branch in (0, 1))
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
