"""`fastcar run`: decode with a compiled artifact."""

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Option

import fastcar_compile as fc
from fastcar_compile.cli import options
from fastcar_compile.cli.common import JsonOption, Writes, command, stages
from fastcar_compile.cli.inspect import DigestOption, KeyOption, RereadOption
from fastcar_compile.cli.output import print_fields, print_result, print_text
from fastcar_compile.config.listing import Needs
from fastcar_compile.errors import UserError, count_text, os_errors

SHOWN = 32
"""Tokens of each row that are printed for a person."""


@command
def run_command(
    artifact: options.ArtifactArgument,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    num_tokens: Annotated[int, Option(min=1)] = 256,
    jacobi: str | None = None,
    backend: Annotated[str, Option(autocompletion=options.BACKENDS)] = "cpu",
    threshold: options.ThresholdOption = None,
    thresholds: Path | None = None,
    seed: Annotated[int, Option(min=0), Needs("temperature")] = 0,
    temperature: float = 0.0,
    top_k: Annotated[int | None, Needs("temperature")] = None,
    top_p: Annotated[float | None, Needs("temperature")] = None,
    repetition_penalty: float = 1.0,
    guidance: float = 1.0,
    exact: Annotated[bool, Needs("temperature")] = False,
    negative_prompt: Annotated[str | None, Needs("guidance")] = None,
    context: Path | None = None,
    context_mask: Annotated[Path | None, Needs("context")] = None,
    threads: Annotated[int | None, Option(min=1)] = None,
    output: Annotated[Path | None, options.OUTPUT, Writes()] = None,
    trace: Annotated[Path | None, Writes("trace")] = None,
    digest: DigestOption = None,
    public_key: KeyOption = None,
    reread: RereadOption = True,
    as_json: JsonOption = False,
) -> None:
    """Generate tokens; print replay ratio and speed.

    Args:
        prompt: Token ids, separated by commas or blanks.
        prompt_file: .npy, .npz or .safetensors, int64 [P] or [B, P].
        num_tokens: Tokens to generate.
        jacobi: Decode so many positions at once, or auto; 1 is sequential. Default: as compiled.
        backend: cpu, onnxruntime, hls-csim, eager, board or webgpu.
        thresholds: File of `fastcar calibrate`.
        seed: Of the sampling.
        temperature: 0 is greedy.
        top_k: Draw among so many most probable tokens.
        top_p: Draw among the most probable tokens of this sum.
        repetition_penalty: Above 1: against tokens that were there.
        guidance: Classifier-free guidance of pairs of rows; 1 has no effect.
        exact: Draw the same tokens on every machine, from equal logits.
        negative_prompt: The prompt that guidance leads away from.
        context: What cross-attention reads: float32 [B, L, C].
        context_mask: Its tokens that are seen: bool [B, L].
        threads: CPU threads.
        output: Write the tokens to this .npy file.
        trace: Write the replay decisions to this .npy file.
    """
    if (prompt is None) == (prompt_file is None):
        raise UserError("exactly one of --prompt and --prompt-file is needed", hint="for example --prompt 16")
    options.require_one({"--threshold": threshold, "--thresholds": thresholds})
    for option, path in (("output", output), ("trace", trace)):
        if path is not None and path.suffix != ".npy":
            raise UserError(f"the {option} {path} is not a .npy file", hint="end its name in .npy")
    from_file = prompt_file and options.read_tokens(prompt_file, "prompt file", dims=(1, 2))
    ids = options.parse_prompt(str(prompt)) if from_file is None else from_file
    order = None if jacobi is None else options.parse_jacobi(jacobi)
    limits = None if threshold is None else options.parse_thresholds(threshold)
    sampling = fc.Sampling(temperature, top_k, top_p, repetition_penalty, guidance, seed, exact)
    with stages(as_json, "run", "checking the files") as show:
        loaded = fc.load(artifact, digest=digest, require_signature=public_key, reread=reread)
        ids = to_rows(ids, loaded.config.batch_size, negative_prompt, guided=guidance != 1)
        show(f"opening the {backend} backend")
        limits_file = None if thresholds is None else options.existing(thresholds, "thresholds file")
        session = loaded.session(backend=backend, record=trace is not None, threads=threads, thresholds=limits_file)
        if limits is not None:
            session.set_threshold(limits)
        if context is not None:
            seen = None if context_mask is None else options.read_context(context_mask, mask=True)
            session.set_context(options.read_context(context, mask=False), seen)
        times = list[float]()  # when each token was chosen

        def count(_tokens: object) -> None:
            times.append(time.perf_counter())
            show(f"{len(times)} of {num_tokens} tokens")

        start = time.perf_counter()
        tokens = session.generate(ids, num_tokens, sample=sampling, on_token=count, jacobi=order)
        end = time.perf_counter()
    rows: list[list[int]] = np.asarray(tokens).tolist()
    report = summary(session, rows, start, times[0] if times else end, end)
    report |= {"backend": backend, "output": output, "trace": trace}
    _write(tokens, output)
    _write(session.stats.decisions if trace else None, trace)
    frame = loaded.config.tokens_per_frame
    print_result(as_json, report | {"tokens": rows}, lambda: _show(report, rows, frame))


def _write(array: Any, path: Path | None) -> None:
    if path is not None:
        with os_errors("the file cannot be written", path):
            np.save(path, np.asarray(array), allow_pickle=False)


def summary(session: fc.Session, tokens: list[list[int]], start: float, first: float, end: float) -> dict[str, Any]:
    """Return replay ratio and speed. Times in seconds; tokens per second count all rows, over the decode steps only."""
    rows, count = len(tokens), len(tokens[0])
    # The first token comes with the prompt, so count - 1 forwards took the decoding time.
    decoding = end - first
    speed = rows * (count - 1) / decoding if count > 1 and decoding > 0 else None
    return {
        "rows": rows,
        "num_tokens": count,
        "replay_ratio": session.stats.replay_ratio,
        "per_layer": list(session.stats.per_layer),
        "forwards": session.stats.forwards,
        "tokens_per_step": session.stats.tokens_per_step,
        "prefill_seconds": first - start,
        "decode_seconds": decoding,
        "tokens_per_second": speed,
    }


def _show(report: dict[str, Any], rows: list[list[int]], frame: int) -> None:
    speed = report["tokens_per_second"]
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    several = f", {report['tokens_per_step']:.2f} tokens a decode step" if report["tokens_per_step"] > 1 else ""
    none = f": the first frame, of {count_text(frame, 'token')}, has none before it to replay"
    fields = {
        "decoded": f"{report['rows']} x {report['num_tokens']} tokens on {report['backend']}{rate}{several}",
        "time": f"prompt {report['prefill_seconds']:.3f} s, decode {report['decode_seconds']:.3f} s",
        "replay": f"{report['replay_ratio']:.2%} of all MLPs{none if report['num_tokens'] - 1 <= frame else ''}",
        "per layer": ", ".join(f"{ratio:.2%}" for ratio in report["per_layer"]),
    }
    written = {name: str(report[name]) for name in ("output", "trace") if report[name] is not None}
    print_fields(fields | written)
    if "output" not in written:
        print_text("")
        for row in rows:
            print_text(" ".join(map(str, row[:SHOWN])) + " …" * (len(row) > SHOWN))
        if report["num_tokens"] > SHOWN:
            print_text(f"\nthe first {SHOWN} of each row; --output FILE.npy writes all, and --json prints all")


def to_rows(ids: options.Tokens, rows: int, negative: str | None = None, guided: bool = False) -> options.Tokens:
    """Return one prompt for every row, int64 [B, P]: [P] or [1, P] is repeated, [B, P] is kept.

    Args:
        ids: the prompts. rows: B.
        negative: token ids of the unconditional prompt; then `ids` are the prompts of the first half of the rows.
        guided: rows b and b + B / 2 are pairs.

    Raises:
        UserError: another number of rows, or guidance without an unconditional prompt.
    """
    table = np.atleast_2d(ids)
    if negative is None:
        if guided and table.shape[0] != rows:
            hint = f"give --negative-prompt, or --prompt-file with {rows} rows, the unconditional ones last"
            raise UserError("guidance needs the unconditional prompts too", hint=hint)
        return _repeated(table, rows)
    if not guided or rows % 2:
        hint = "give --guidance with it, and an artifact with an even batch_size"
        raise UserError("--negative-prompt is for pairs of rows", hint=hint)
    other = options.parse_prompt(negative)
    if len(other) != table.shape[1]:
        what = f"the prompt has {count_text(table.shape[1], 'token')}, the negative prompt {len(other)}"
        raise UserError(what, hint="give as many: both rows of a pair have the same position")
    return np.concatenate([_repeated(table, rows // 2), _repeated(np.atleast_2d(other), rows // 2)])


def _repeated(table: options.Tokens, rows: int) -> options.Tokens:
    if table.shape[0] not in (1, rows):
        what = f"the prompt has {count_text(table.shape[0], 'row')}, the artifact decodes {rows}"
        raise UserError(what, hint=f"give 1 or {rows} rows")
    return np.ascontiguousarray(np.broadcast_to(table, (rows, table.shape[1])))
