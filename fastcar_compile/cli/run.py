"""`fastcar run`: decode with a compiled artifact."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from fastcar_compile.artifact.store import load_tensors
from fastcar_compile.cli.common import (
    ExitCode,
    JsonOption,
    command,
    existing,
    parse_thresholds,
    print_json,
    require_one,
    stages,
    stdout,
)
from fastcar_compile.cli.sizes import decoder_sizes
from fastcar_compile.errors import UserError
from fastcar_compile.estimate.trace import save_trace


class Sampler:
    """Picks tokens from logits and keeps the time: greedy at temperature 0, else seeded multinomial sampling.

    Attributes:
        first: time of the first pick in seconds (the prompt is read by then); None before it.
        count: picks so far.
    """

    def __init__(self, temperature: float, seed: int, total: int, show: Any) -> None:
        if temperature < 0:
            raise UserError(f"the temperature is {temperature}", hint="give 0 (greedy) or a positive number")
        self.temperature, self.total, self.show = temperature, total, show
        self.generator = torch.Generator().manual_seed(seed)
        self.first: float | None = None
        self.count = 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits float32 [B, V] to token ids int64 [B]."""
        if self.first is None:
            self.first = time.perf_counter()
        self.count += 1
        self.show(f"{self.count} of {self.total} tokens")
        if self.temperature == 0:
            return logits.argmax(-1)
        weights = torch.softmax(logits.double() / self.temperature, -1)
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]


@command
def run_command(
    artifact: Annotated[Path, typer.Argument(help="Folder of the artifact.")],
    prompt: Annotated[str | None, typer.Option(help="Token ids, separated by commas or blanks.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help=".npy or .safetensors, int64 [P] or [B, P].")] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 256,
    backend: Annotated[str, typer.Option(help="cpu, onnxruntime, hls-csim, eager or board.")] = "cpu",
    threshold: Annotated[str | None, typer.Option(help="Overrides the compiled threshold(s).")] = None,
    thresholds: Annotated[Path | None, typer.Option(help="File of `fastcar calibrate`.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the tokens to this .npy file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the replay decisions to this .npy file.")] = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Generate tokens; prints the replay ratio and the speed."""
    import fastcar_compile as fc

    if (prompt is None) == (prompt_file is None):
        raise UserError("exactly one of --prompt and --prompt-file is needed")
    require_one([("--threshold", threshold is not None), ("--thresholds", thresholds is not None)])
    for option, path in (("output", output), ("trace", trace)):
        if path is not None and path.suffix != ".npy":
            raise UserError(f"the {option} {path} is not a .npy file", hint="end its name in .npy")
    ids = parse_prompt(prompt) if prompt is not None else read_prompt(prompt_file)
    limits = None if threshold is None else parse_thresholds(threshold)
    with stages(as_json, "run") as show:
        show("checking the files")
        loaded = fc.load(str(artifact))
        ids = to_rows(ids, decoder_sizes(loaded.manifest).batch_size)
        show(f"opening the {backend} backend")
        given = {} if thresholds is None else {"thresholds": existing(thresholds, "thresholds file")}
        session = loaded.session(backend=backend, record=trace is not None, threads=threads, **given)
        if limits is not None:
            session.set_threshold(limits)
        sampler = Sampler(temperature, seed, num_tokens, show)
        start = time.perf_counter()
        tokens = session.generate(ids, num_tokens, sample=sampler, progress=False)
        end = time.perf_counter()
    if output is not None:
        np.save(output, np.asarray(tokens), allow_pickle=False)
    if trace is not None:
        save_trace(session.stats.decisions, trace)
    report = summary(session, tokens, start, sampler.first or end, end)
    report |= {"backend": backend, "output": None if output is None else str(output)}
    report["trace"] = None if trace is None else str(trace)
    if as_json:
        print_json(report | {"tokens": tokens})
    else:
        _show(report, tokens)
    return ExitCode.OK


def summary(session: Any, tokens: Tensor, start: float, first: float, end: float) -> dict[str, Any]:
    """Replay ratio and speed. Times in seconds; tokens per second count all rows, over the decode steps only."""
    rows, count = tokens.shape
    decoding = end - first
    speed = rows * (count - 1) / decoding if count > 1 and decoding > 0 else None
    return {
        "rows": rows,
        "num_tokens": count,
        "replay_ratio": session.stats.replay_ratio,
        "per_layer": list(session.stats.per_layer),
        "forwards": session.stats.forwards,
        "prefill_seconds": first - start,
        "decode_seconds": decoding,
        "tokens_per_second": speed,
    }


def _show(report: dict[str, Any], tokens: Tensor) -> None:
    console = stdout()
    speed = report["tokens_per_second"]
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    shape = f"{report['rows']} x {report['num_tokens']} tokens"
    times = f"prompt {report['prefill_seconds']:.3f} s, decode {report['decode_seconds']:.3f} s"
    console.print(f"{shape} on {report['backend']}: {times}{rate}", markup=False, soft_wrap=True)
    layers = ", ".join(f"{layer}: {ratio:.2%}" for layer, ratio in enumerate(report["per_layer"]))
    console.print(f"replay ratio {report['replay_ratio']:.2%} (layer {layers})", markup=False, soft_wrap=True)
    if report["output"] is not None:
        console.print(f"tokens written to {report['output']}", markup=False, soft_wrap=True)
        return
    for row in tokens.tolist():
        console.print(" ".join(map(str, row)), markup=False, soft_wrap=True)


def parse_prompt(text: str) -> np.ndarray:
    """Token ids from "16" or "16, 3 4", int64 [P].

    Raises:
        UserError: not integers, or none.
    """
    parts = text.replace(",", " ").split()
    try:
        ids = [int(part) for part in parts]
    except ValueError:
        ids = []
    if not ids:
        raise UserError(
            f"the prompt {text!r} is not a list of token ids", hint='give integers, for example "16" or "16,3"'
        )
    return np.array(ids, np.int64)


def read_prompt(path: Path | None) -> np.ndarray:
    """Token ids from a .npy file or a .safetensors file (its tensor "tokens", or its only one), int64 [P] or [B, P].

    Raises:
        UserError: missing, of another kind, or not integers.
    """
    assert path is not None
    existing(path, "prompt file")
    if path.suffix == ".npy":
        try:
            ids = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"the prompt file cannot be read: {error}", where=str(path)) from error
    elif path.suffix == ".safetensors":
        tensors = load_tensors(path, "numpy")
        name = "tokens" if "tokens" in tensors or len(tensors) != 1 else next(iter(tensors))
        if name not in tensors:
            raise UserError(
                f"the prompt file has no tensor 'tokens', only {', '.join(sorted(tensors))}", where=str(path)
            )
        ids = tensors[name]
    else:
        raise UserError("the prompt file is neither .npy nor .safetensors", where=str(path))
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2) or not ids.size:
        text = f"the prompt file holds {ids.dtype} {list(ids.shape)}, expected integers [P] or [B, P]"
        raise UserError(text, where=str(path))
    return ids.astype(np.int64)


def to_rows(ids: np.ndarray, rows: int) -> Tensor:
    """One prompt for every row: [P] or [1, P] is repeated, [B, P] is kept; int64 [B, P].

    Raises:
        UserError: another number of rows.
    """
    table = np.atleast_2d(ids)
    if table.shape[0] not in (1, rows):
        raise UserError(
            f"the prompt has {table.shape[0]} rows, the artifact decodes {rows}", hint=f"give 1 or {rows} rows"
        )
    return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(table, (rows, table.shape[1]))).copy())
