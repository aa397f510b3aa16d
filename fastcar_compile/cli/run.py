"""`fastcar run`: decode with a compiled artifact."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.options import existing, parse_prompt, parse_thresholds, read_tokens, require_one
from fastcar_compile.cli.output import print_fields, print_json, print_text
from fastcar_compile.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fastcar_compile import Session

    Tokens = NDArray[np.int64]


def backend_names() -> list[str]:
    """Return the names of the backends, for shell completion."""
    from fastcar_compile.runtime.backends import BACKENDS

    return BACKENDS.names()


class Sampler:
    """Picks tokens from logits and keeps the time: greedy at temperature 0, else seeded multinomial sampling.

    Attributes:
        first: time of the first pick in seconds, when the prompt has been read; None before it.
        count: picks so far.
    """

    def __init__(self, temperature: float, seed: int, total: int, show: Callable[[str], None]) -> None:
        import numpy as np

        if temperature < 0:
            raise UserError(f"the temperature is {temperature}", hint="give 0 (greedy) or a positive number")
        self.temperature, self.total, self.show = temperature, total, show
        self.generator = np.random.default_rng(seed)
        self.first: float | None = None
        self.count = 0

    def __call__(self, logits: NDArray[np.float32]) -> Tokens:
        """Return token ids int64 [B] for logits float32 [B, V]."""
        if self.first is None:
            self.first = time.perf_counter()
        self.count += 1
        self.show(f"{self.count} of {self.total} tokens")
        return logits.argmax(-1) if self.temperature == 0 else self._drawn(logits)

    def _drawn(self, logits: NDArray[np.float32]) -> Tokens:
        """Return the first token of every row whose cumulated probability exceeds a uniform number."""
        import numpy as np

        scaled = np.asarray(logits, np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max(-1, keepdims=True)).cumsum(-1)
        limits = self.generator.random((len(weights), 1)) * weights[:, -1:]
        return (weights > limits).argmax(-1)


@command
def run_command(
    artifact: Annotated[Path, typer.Argument(help="Folder of the artifact.")],
    prompt: Annotated[str | None, typer.Option(help="Token ids, separated by commas or blanks.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help=".npy, .npz or .safetensors, int64 [P] or [B, P].")] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 256,
    backend: Annotated[
        str, typer.Option(help="cpu, onnxruntime, hls-csim, eager or board.", autocompletion=backend_names)
    ] = "cpu",
    threshold: Annotated[str | None, typer.Option(help="Overrides the compiled threshold(s).")] = None,
    thresholds: Annotated[Path | None, typer.Option(help="File of `fastcar calibrate`.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the tokens to this .npy file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the replay decisions to this .npy file.")] = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Generate tokens; print replay ratio and speed."""
    import numpy as np

    import fastcar_compile as fc

    if (prompt is None) == (prompt_file is None):
        raise UserError("exactly one of --prompt and --prompt-file is needed", hint="for example --prompt 16")
    require_one([("--threshold", threshold is not None), ("--thresholds", thresholds is not None)])
    _check_suffixes(output=output, trace=trace)
    ids = read_tokens(prompt_file, "prompt file", dims=(1, 2)) if prompt_file else parse_prompt(str(prompt))
    limits = None if threshold is None else parse_thresholds(threshold)
    with stages(as_json, "run") as show:
        show("checking the files")
        loaded = fc.load(str(artifact))
        ids = to_rows(ids, loaded.config.batch_size)
        show(f"opening the {backend} backend")
        given = {} if thresholds is None else {"thresholds": existing(thresholds, "thresholds file")}
        session = loaded.session(backend=backend, record=trace is not None, threads=threads, **given)
        if limits is not None:
            session.set_threshold(limits)
        sampler = Sampler(temperature, seed, num_tokens, show)
        start = time.perf_counter()
        tokens = session.generate(ids, num_tokens, sample=sampler, progress=False)
        end = time.perf_counter()
    rows: list[list[int]] = np.asarray(tokens).tolist()
    report = summary(session, rows, start, sampler.first or end, end)
    report |= {"backend": backend, "output": output, "trace": trace}
    _write(tokens, output)
    _write(session.stats.decisions if trace else None, trace)
    if as_json:
        print_json(report | {"tokens": rows})
    else:
        _show(report, rows)
    return ExitCode.OK


def _check_suffixes(**files: Path | None) -> None:
    for option, path in files.items():
        if path is not None and path.suffix != ".npy":
            raise UserError(f"the {option} {path} is not a .npy file", hint="end its name in .npy")


def _write(array: Any, path: Path | None) -> None:
    import numpy as np

    if path is not None:
        np.save(path, np.asarray(array), allow_pickle=False)


def summary(session: Session, tokens: list[list[int]], start: float, first: float, end: float) -> dict[str, Any]:
    """Return replay ratio and speed. Times in seconds; tokens per second count all rows, over the decode steps only."""
    rows, count = len(tokens), len(tokens[0])
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


def _show(report: dict[str, Any], rows: list[list[int]]) -> None:
    speed = report["tokens_per_second"]
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    fields = {
        "decoded": f"{report['rows']} x {report['num_tokens']} tokens on {report['backend']}{rate}",
        "time": f"prompt {report['prefill_seconds']:.3f} s, decode {report['decode_seconds']:.3f} s",
        "replay": f"{report['replay_ratio']:.2%} of all MLPs",
        "per layer": ", ".join(f"{ratio:.2%}" for ratio in report["per_layer"]),
    }
    written = {name: str(report[name]) for name in ("output", "trace") if report[name] is not None}
    print_fields(fields | written)
    if "output" not in written:
        print_text("")
        for row in rows:
            print_text(" ".join(map(str, row)))


def to_rows(ids: Tokens, rows: int) -> Tokens:
    """Return one prompt for every row, int64 [B, P]: [P] or [1, P] is repeated, [B, P] is kept.

    Raises:
        UserError: another number of rows.
    """
    import numpy as np

    table = np.atleast_2d(ids)
    if table.shape[0] not in (1, rows):
        raise UserError(
            f"the prompt has {table.shape[0]} rows, the artifact decodes {rows}", hint=f"give 1 or {rows} rows"
        )
    return np.ascontiguousarray(np.broadcast_to(table, (rows, table.shape[1])))
