"""`fastcar compile`: a model folder or an exported program to an artifact."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Option

import fastcar_compile as fc
from fastcar_compile.artifact.explain import RASTER, order_text, rows_text
from fastcar_compile.cli.common import ExitCode, JsonOption, MayRead, Writes, command, stages
from fastcar_compile.cli.options import (
    OUTPUT,
    TARGETS,
    TokensPerFrameOption,
    names_of,
    parse_heads,
    parse_jacobi,
    parse_thresholds,
    require_one,
)
from fastcar_compile.cli.output import print_fields, print_result, print_table, print_text
from fastcar_compile.cli.words import Needs, Without
from fastcar_compile.errors import UserError, count_text, size_text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fastcar_compile.codegen.plan import Bank, Fallback
    from fastcar_compile.ir.types import LayerSite
    from fastcar_compile.report.dry_run import Speed

T = TypeVar("T")
REPLAYS = Without("no_replay")
FORMATS = "fastcar_compile.config.formats"


def show_dry_run(report: fc.DryRun) -> None:
    """Print what would be built: layers, places, memory, engine, speed, and what is refused."""
    memory = report.memory
    print_fields(_summary(report))
    _show_table(("layers", "MLP, source", "size", "replay"), map(_layer_row, _alike(report.layers, _kind)))
    places = ((p.what, p.unit, span(p.layers), p.calls or "", p.reason) for p in report.placements)
    _show_table(("part", "runs on", "layers", ">calls", "why"), places)
    state = ", ".join(f"{role} {size_text(size)}" for role, size in memory.state.items())
    print_text("")
    print_fields({"parameters": size_text(memory.weights), "state": state})
    banks = _alike(memory.banks, lambda b: (b.memory, b.used, b.capacity, not b.tag))
    _show_table(("memory", "holds", ">used", ">of", "fits"), map(_bank_row, banks))
    if report.speed:
        titles = ("predicted", ">MLPs", ">tokens/s", ">ms/step", ">bandwidth", ">J/token", "bound by")
        _show_table(titles, map(_speed_row, report.speed))
    _show_list("fallbacks", map(_fallback, report.fallbacks))
    _show_list("refused by compile", (_lines(p.what, p.where, p.hint) for p in report.problems))


def _show_table(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    print_text("")
    print_table(titles, rows)


def _alike(items: Iterable[T], key: Callable[[T], object]) -> Iterator[list[T]]:
    """Yield the neighbours of equal keys."""
    return (list(group) for _, group in groupby(items, key))


def _summary(report: fc.DryRun) -> dict[str, str]:
    decoder, options = report.decoder, report.options
    able = sum(layer.replay is not None for layer in report.layers)
    fields = {
        "dry run": "would be built; nothing was written" if report.ok else "would be REFUSED, see below",
        "decoder": f"{count_text(decoder.num_layers, 'layer')}, hidden {decoder.hidden_size}, "
        f"{decoder.vocab_size or 'no'} vocabulary entries, {decoder.max_seq_len} positions, "
        f"{count_text(decoder.tokens_per_frame, 'token')} per frame, {rows_text(decoder.batch_size, decoder.rows)}",
        **({} if (order := order_text(options)) == RASTER else {"order": order}),
        "options": f"target {report.target}, quant {options.quant}, kv {options.kv}, numerics {options.numerics}, "
        f"offload {options.offload}",
        "replay": f"{able} of {count_text(len(report.layers), 'layer')} may replay",
        "pipeline": re.sub(r"\{.*?\}(?=,|$)", "", report.pipeline).replace(",", ", "),
    }
    return fields | _engine(report)


def _engine(report: fc.DryRun) -> dict[str, str]:
    design, found = report.design, report.exploration
    if design is None or found is None:
        return {"engine": "none"}
    apart = ", in RTL" if design.engine == "rtl" else ""
    why = f"; a faster one needs {', '.join(found.faster)}" if found.faster else ""
    return {
        "engine": f"{count_text(design.ports, 'weight port')} of 128 bits, {count_text(design.lanes, 'lane')}, "
        f"{count_text(design.spec.cores, 'core')} at {design.budget.clock_mhz:g} MHz{apart}",
        "chosen": f"of {count_text(found.tried, 'design')}, {found.rejected} too large; bound by {found.bound_by}{why}",
    }


def _layer_row(group: Sequence[LayerSite]) -> tuple[str, ...]:
    """Return the row of layers that are alike."""
    first, attention, mlp, replay = group[0], group[0].attention, group[0].mlp, group[0].replay
    # A star stands for the layer's number where the row is that of several layers.
    path = re.sub(rf"\b{first.layer}\b", "*", first.module_path, count=1) if len(group) > 1 else first.module_path
    return (
        span([layer.layer for layer in group]),
        f"{path}\n{PurePosixPath(first.source).name}",
        f"{'gated ' if mlp.gated else ''}{mlp.activation} {mlp.hidden} -> {mlp.intermediate}\n"
        f"heads {attention.num_heads}, kv {attention.num_kv_heads}, dim {attention.head_dim}",
        "computes always" if replay is None else f"{replay.gate}, threshold {replay.threshold:g}",
    )


def _kind(layer: LayerSite) -> tuple[object, ...]:
    """What layers of one row of the table have in common."""
    attention, mlp, replay = layer.attention, layer.mlp, layer.replay
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    rule = None if replay is None else (replay.gate, replay.threshold)
    return layer.source, heads, mlp.gated, mlp.activation, mlp.hidden, mlp.intermediate, rule


def _bank_row(group: Sequence[Bank]) -> tuple[str, ...]:
    """Return the row of banks that are filled alike."""
    first, last = group[0], group[-1]
    tags = first.tag if len(group) == 1 else f"{first.tag} .. {last.tag}, each"
    holds = first.holds if len(group) == 1 else f"weight streams of ports 0 to {len(group) - 1}"
    room = "-" if first.capacity is None else size_text(first.capacity)
    fits = "-" if first.capacity is None else "yes" if first.fits else "NO"
    return f"{first.memory} {tags}".rstrip(), holds, size_text(first.used), room, fits


def _speed_row(s: Speed) -> tuple[str, ...]:
    return (
        *(s.case, f"{s.replay_ratio:.1%}", f"{s.tokens_per_second:.2f}", f"{s.seconds_per_step * 1e3:.2f}"),
        *(f"{s.bandwidth_utilisation:.1%}", f"{s.energy_per_token_j:.3f}", s.bound_by),
    )


def _fallback(found: Fallback) -> str:
    layers = f" of layers {span(found.layers)}" if found.layers else ""
    return _lines(f"{found.what}{layers}: {found.instead}; {found.reason}", found.where, found.hint)


def _lines(what: str, where: str, hint: str) -> str:
    more = [f"    {name}: {text}" for name, text in (("where", where), ("hint", hint)) if text]
    return "\n".join([what, *more])


def _show_list(title: str, items: Iterable[str]) -> None:
    if texts := [f"  - {text}" for text in items]:
        print_text("\n".join([f"\n{title}:", *texts]))


def span(layers: Sequence[int]) -> str:
    """Return numbers as runs: "0-3, 5"."""
    # In a run of neighbours, the distance of a number from its place in the list stays.
    runs = ([layer for _, layer in run] for run in _alike(enumerate(layers), lambda pair: pair[1] - pair[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@command
def compile_command(
    model: Path,
    output: Annotated[Path | None, OUTPUT, Writes("artifact", folder=True)] = None,
    target: Annotated[str, Option(autocompletion=TARGETS), MayRead()] = "cpu",
    tokens_per_frame: TokensPerFrameOption = None,
    max_seq_len: int | None = None,
    batch_size: int = 1,
    rows: int | None = None,
    grid: str | None = None,
    lag: Annotated[int, Option(min=1), Needs("grid")] = 2,
    lead: Annotated[int, Option(min=0), Needs("grid")] = 0,
    prefix: Annotated[int, Option(min=0), Needs("grid")] = 0,
    jacobi: str | None = None,
    prefill_chunk: int | None = None,
    quant: Annotated[str | None, Option(autocompletion=names_of(f"{FORMATS}:QUANT_FORMATS.keys"))] = None,
    gate: Annotated[str | None, Option(autocompletion=names_of("fastcar_compile.gates:GATES.keys")), REPLAYS] = None,
    gate_weights: Annotated[Path | None, REPLAYS] = None,
    draft: Annotated[Path | None, REPLAYS] = None,
    rotary: Annotated[str | None, REPLAYS] = None,
    threshold: Annotated[str | None, REPLAYS] = None,
    heads: Annotated[str | None, REPLAYS] = None,
    refresh_every: Annotated[int | None, REPLAYS] = None,
    offload: str | None = None,
    engine: str | None = None,
    max_chain: Annotated[int | None, REPLAYS] = None,
    couple_cfg: Annotated[bool, REPLAYS] = False,
    no_replay: bool = False,
    window: int | None = None,
    sinks: Annotated[int | None, Needs("window")] = None,
    window_positions: Annotated[str | None, Needs("window")] = None,
    kv: Annotated[str | None, Option(autocompletion=names_of(f"{FORMATS}:KV_TYPES.keys"))] = None,
    numerics: str | None = None,
    host_cpus: str = "native",
    dry_run: bool = False,
    strict: bool = False,
    cache: str | None = None,
    no_cache: bool = False,
    cache_libraries: Annotated[bool, Needs("cache")] = False,
    cache_write: Annotated[bool, Needs("cache")] = False,
    as_json: JsonOption = False,
) -> ExitCode:
    """Compile a trained decoder to an artifact.

    With --dry-run, say what would be compiled.

    Args:
        model: Hugging Face folder (config.json, *.safetensors) or .pt2 file.
        output: Folder of the artifact.
        target: Target name or .toml file; see `fastcar targets`.
        max_seq_len: Positions of the KV cache; default: the model's.
        batch_size: Videos decoded together.
        rows: Rows of each video, with positions of their own; default: as --grid or --jacobi need, else one position.
        grid: Image rows and columns of a frame, such as 8x8: decode several image rows at once.
        lag: With --grid: columns that an image row is behind the one above it.
        lead: With --grid: tokens of a frame in front of its grid, such as an action.
        prefix: With --grid: tokens in front of the first frame, such as a text.
        jacobi: Decode so many positions at once, or auto: the same tokens, sooner. It sets --rows.
        prefill_chunk: Tokens per call of the prefill; default: 64, or an equal part of a frame.
        quant: none, bf16, fp16, w8a8 or w4a8; default: w8a8 where the target has an accelerator.
        gate: What decides: tas, input_delta, learned; always, never, random. Default: tas.
        gate_weights: Weights of gate learned, .safetensors.
        draft: What a replay computes instead of the MLP, .safetensors of `fastcar fit-draft`; it brings gate learned.
        rotary: both, or key: gate tas as in the authors' code, with the query from before its rotary embedding.
        threshold: A number, inf, -inf, ">-4" (score > -4), or one per layer; default: the gate's.
        heads: Query heads of gate tas: 0,2; or 0,2/all/3:1,1:-1 per layer.
        refresh_every: Every n-th frame computes everything.
        offload: What the accelerator computes: mlp; linears (also projections and head); all (the step).
            Default: all where it can, or linears where that is faster; else mlp.
        engine: The accelerator's linears and MLPs: hls (in its one kernel, default), or rtl (a kernel of their own).
        max_chain: Replays in a row at one slot at most.
        couple_cfg: Guidance pairs replay together.
        no_replay: Compile the dense decoder.
        window: Sparse attention: attend to this many last tokens.
        sinks: ... and to this many first ones; default: 16.
        window_positions: Rotary positions with a window: absolute (default), or cache.
        kv: What keys and values are cached as: float32 (default), float16, bfloat16; int8 (default with --offload all).
        numerics: native, or exact: equal bits on every backend; for w8a8 and w4a8 with --kv int8.
        host_cpus: Instruction sets to carry libraries for: native,avx512-vnni,avx2,neon ...
        dry_run: Report what would be built; write nothing. Needs no weights.
        strict: Refuse whatever runs in another way than asked for.
        cache: Folder, or URL of an HTTP store, of what other builds made; default: builds in $FASTCAR_CACHE.
        no_cache: Make everything anew, and keep nothing.
        cache_libraries: Take libraries and whole builds from the store too, which are code: whoever writes there
            can have code run here.
        cache_write: Put what is made into the store.
    """
    given: dict[str, Any] = dict(locals())
    from fastcar_compile.config.targets import load_target, require_buildable

    require_buildable(load_target(target))  # cheap refusals come before the model is read
    given["threshold"] = None if threshold is None else parse_thresholds(threshold)
    given["heads"] = None if heads is None else parse_heads(heads)
    given["positions"] = window_positions
    given["jacobi"] = None if jacobi is None else parse_jacobi(jacobi)
    if grid is not None:
        sides = re.fullmatch(r"(\d{1,9})x(\d{1,9})", grid, re.ASCII)
        if sides is None:
            hint = "give image rows and columns, for example 8x8"
            raise UserError(f"{grid!r} is not a grid", where="--grid", hint=hint)
        given["wavefront"] = fc.Wavefront((int(sides[1]), int(sides[2])), lag, lead, prefix)
    sparse = _of(fc.SparseAttention, given)
    options = _of(fc.CompileConfig, given) | {"strict": strict}
    options["sparse_attention"] = fc.SparseAttention(**sparse) if sparse else None
    options["replay"] = None if no_replay else fc.ReplayConfig(**_of(fc.ReplayConfig, given))
    options["host_cpus"] = [name.strip() for name in host_cpus.split(",")]
    require_one({"--no-cache": no_cache, "--cache": cache})
    options["cache"] = False if no_cache else True if cache is None else cache
    if cache_write or cache_libraries:
        options["cache"] = fc.Cache(remote=cache, write=cache_write, libraries=cache_libraries)
    if output is None and not dry_run:
        raise UserError("there is no folder for the artifact", hint="give --output FOLDER, or --dry-run")
    with stages(as_json, "dry run" if dry_run else "compile", "checking the model"):
        build: Any = fc.compile  # its overloads know literals alone
        found = build(model, dry_run=dry_run, output=str(output), **options)
    if not dry_run:
        _show_artifact(found, as_json)
        return ExitCode.OK
    print_result(as_json, found.to_json(), lambda: show_dry_run(found))
    return ExitCode.OK if found.ok else ExitCode.USER_ERROR


def _of(config: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of a configuration. Those that were left out are None, and left to it."""
    return {name: given[name] for name in config.model_fields if given.get(name) is not None}


def _show_artifact(artifact: fc.Artifact, as_json: bool) -> None:
    layers = artifact.manifest.layers.layers  # `artifact.sites` are the program's, which needs torch
    path, sites, files = artifact.path, len(layers), len(artifact.manifest.files)
    size = sum(entry.size for entry in artifact.manifest.files.values())
    able = sum(site.replay is not None for site in layers)
    options = artifact.manifest.options
    gate = "no gate" if options.replay is None else f"gate {options.replay.gate}"
    text = f"{path}: target {options.target}, numbers {options.quant}, {gate}; "
    text += f"{able} of {count_text(sites, 'layer')} may replay, {count_text(files, 'file')}, {size_text(size)}"
    facts = {"path": path, "sites": sites, "files": files, "bytes": size, "digest": artifact.digest}
    print_result(as_json, facts, lambda: print_text(f"{text}\n{artifact.digest}"))
