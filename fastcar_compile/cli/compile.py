"""`fastcar compile`: a model folder or an exported program to an artifact."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator
from typer import Context, Exit, Option, echo

import fastcar_compile as fc
from fastcar_compile.artifact.explain import RASTER, order_text, rows_text
from fastcar_compile.cli.common import ExitCode, JsonOption, MayRead, Writes, command, stages
from fastcar_compile.cli.options import (
    OUTPUT,
    TARGETS,
    parse_heads,
    parse_jacobi,
    parse_thresholds,
    require_one,
    with_parameters,
)
from fastcar_compile.cli.output import print_fields, print_result, print_table, print_text
from fastcar_compile.config.listing import Listed, Needs, Without, listed
from fastcar_compile.config.options import PARTS, option_words
from fastcar_compile.errors import UserError, count_text, size_text

if TYPE_CHECKING:
    from fastcar_compile.codegen.plan import Bank, Fallback
    from fastcar_compile.ir.types import LayerSite
    from fastcar_compile.report.dry_run import DryRun, Speed

T = TypeVar("T")
STORE, CACHE = Needs("cache"), Option(rich_help_panel="Cache")


def show_dry_run(report: DryRun) -> None:
    """Print what would be built: layers, places, memory, engine, speed, and what is refused."""
    memory = report.memory
    print_fields(_summary(report))
    chosen = (
        (option.name, getattr(report.options, option.name), report.reasons.get(option.name, "as given"))
        for option in listed(fc.CompileConfig)
        if option.listing.decided or option.name in report.reasons
    )
    _show_table(("option", "value", "why"), chosen)
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


def _summary(report: DryRun) -> dict[str, str]:
    decoder, options = report.decoder, report.options
    able = sum(layer.replay is not None for layer in report.layers)
    fields = {
        "dry run": "would be built; nothing was written" if report.ok else "would be REFUSED, see below",
        "decoder": f"{count_text(decoder.num_layers, 'layer')}, hidden {decoder.hidden_size}, "
        f"{decoder.vocab_size or 'no'} vocabulary entries, {decoder.max_seq_len} positions, "
        f"{count_text(decoder.tokens_per_frame, 'token')} per frame, {rows_text(decoder.batch_size, decoder.rows)}",
        **({} if (order := order_text(options)) == RASTER else {"order": order}),
        "target": report.target,
        "replay": f"{able} of {count_text(len(report.layers), 'layer')} may replay",
        "pipeline": re.sub(r"\{.*?\}(?=,|$)", "", report.pipeline).replace(",", ", "),
    }
    return fields | _engine(report)


def _engine(report: DryRun) -> dict[str, str]:
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


FORMS: dict[str, Callable[[str], Any]] = {
    "threshold": parse_thresholds,
    "heads": parse_heads,
    "jacobi": parse_jacobi,
    "gate_weights": Path,
    "draft": Path,
}
"""Option -> what its text means, where it is no plain value."""


def _parameter(word: str, field: Listed, part: Listed) -> Parameter:
    """Return the parameter of an option, with all that typer has to know."""
    kinds, shown = get_args(part.kind) or (part.kind,), part.listing
    marks: list[Any] = [mark for mark in part.marks if isinstance(mark, Needs)]
    told = not shown.decided and part.default and (marks or part is field)
    named: Any = next((mark.func for mark in part.marks if isinstance(mark, AfterValidator)), None)
    known = get_args(part.kind) if get_origin(part.kind) is Literal else named and named.keywords["known"]
    option = Option(
        *([f"--{word}".replace("_", "-")] if bool in kinds else ()),
        help=f"{part.help}  [default: {part.default}]" if told else part.help,
        hidden=shown.expert,
        rich_help_panel=shown.panel or field.listing.panel,
        autocompletion=None if known is None else lambda: list(known),
    )
    marks += [Without("no_replay")] if field.name == "replay" else []
    kind: Any = Path if FORMS.get(word) is Path else int if int in kinds and word not in FORMS else str
    noted: Any = Annotated[bool if bool in kinds else kind | None, option, *marks]
    return Parameter(word, Parameter.KEYWORD_ONLY, default=False if bool in kinds else None, annotation=noted)


def _with_the_list(function: Callable[..., ExitCode]) -> Callable[..., ExitCode]:
    """Give a command the options of the list in the place of its `**given`."""
    return with_parameters(function, [_parameter(*word) for word in option_words()])


def _configured(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `compile` that a command line gives; what it leaves out is left to `compile`."""
    found, several = dict[str, Any](), {name: dict[str, Any]() for name in PARTS}
    for word, field, part in option_words():
        if (value := given[word]) is not None and value is not False:
            several.get(field.name, found)[part.name] = FORMS[word](value) if word in FORMS else value
    return found | {name: PARTS[name](**values) for name, values in several.items() if values}


def show_experts(context: Context, wanted: bool) -> None:
    """Print the help with the options that it leaves out."""
    if wanted:
        for parameter in context.command.params:
            vars(parameter)["hidden"] = False
        echo(context.get_help())
        raise Exit


@command
@_with_the_list
def compile_command(
    model: Path,
    output: Annotated[Path | None, OUTPUT, Writes("artifact", folder=True)] = None,
    target: Annotated[str, Option(autocompletion=TARGETS), MayRead()] = "cpu",
    dry_run: bool = False,
    strict: bool = False,
    as_json: JsonOption = False,
    help_experts: Annotated[bool, Option("--help-experts", is_eager=True, callback=show_experts)] = False,
    no_replay: Annotated[bool, Option("--no-replay", rich_help_panel="Replay")] = False,
    host_cpus: Annotated[str, Option(rich_help_panel="Board", hidden=True)] = "native",
    cache: Annotated[str | None, CACHE] = None,
    no_cache: Annotated[bool, Option("--no-cache", rich_help_panel="Cache")] = False,
    cache_libraries: Annotated[bool, Option("--cache-libraries", rich_help_panel="Cache", hidden=True), STORE] = False,
    cache_write: Annotated[bool, Option("--cache-write", rich_help_panel="Cache", hidden=True), STORE] = False,
    **given: Any,
) -> ExitCode:
    """Compile a trained decoder to an artifact.

    With --dry-run, say what would be compiled.

    Args:
        model: Hugging Face folder (config.json, *.safetensors) or .pt2 file.
        output: Folder of the artifact.
        target: Target name or .toml file; see `fastcar targets`.
        dry_run: Report what would be built; write nothing. Needs no weights.
        strict: Refuse whatever runs in another way than asked for.
        help_experts: Show this message with the options of experts, and exit.
        no_replay: Compile the dense decoder.
        host_cpus: Instruction sets to carry libraries for: native,avx512-vnni,avx2,neon ...
        cache: Folder, or URL of an HTTP store, of what other builds made; default: builds in $FASTCAR_CACHE.
        no_cache: Make everything anew, and keep nothing.
        cache_libraries: Take libraries and whole builds from the store too, which are code: whoever writes there
            can have code run here.
        cache_write: Put what is made into the store.
    """
    from fastcar_compile.config.targets import load_target, require_buildable

    require_buildable(load_target(target))  # cheap refusals come before the model is read
    options = _configured(given) | ({"replay": None} if no_replay else {})
    options["host_cpus"] = [name.strip() for name in host_cpus.split(",")]
    require_one({"--no-cache": no_cache, "--cache": cache})
    options["cache"] = False if no_cache else True if cache is None else cache
    if cache_write or cache_libraries:
        options["cache"] = fc.Cache(remote=cache, write=cache_write, libraries=cache_libraries)
    if output is None and not dry_run:
        raise UserError("there is no folder for the artifact", hint="give --output FOLDER, or --dry-run")
    with stages(as_json, "dry run" if dry_run else "compile", "checking the model"):
        build: Any = fc.compile  # its overloads know literals alone
        found = build(model, target=target, dry_run=dry_run, output=str(output), strict=strict, **options)
    if not dry_run:
        _show_artifact(found, as_json)
        return ExitCode.OK
    print_result(as_json, found.to_json(), lambda: show_dry_run(found))
    return ExitCode.OK if found.ok else ExitCode.USER_ERROR


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
