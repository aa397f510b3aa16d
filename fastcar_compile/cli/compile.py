"""`fastcar compile`: a model folder or an exported program to an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.options import parse_heads, parse_thresholds
from fastcar_compile.cli.output import print_json, print_text, size_text
from fastcar_compile.cli.places import MayRead, Writes
from fastcar_compile.cli.targets import target_names
from fastcar_compile.errors import UserError, count_text
from fastcar_compile.values import model_hint

if TYPE_CHECKING:
    from fastcar_compile import Artifact, ReplayConfig, SparseAttention


def gate_names() -> list[str]:
    """Return the names of the gates, for shell completion."""
    from fastcar_compile.gates import GATES

    return list(GATES)


def quant_names() -> list[str]:
    """Return the names of the quantisation formats, for shell completion."""
    from fastcar_compile.formats import QUANT_FORMATS

    return list(QUANT_FORMATS)


def kv_names() -> list[str]:
    """Return the names of the KV types, for shell completion."""
    from fastcar_compile.formats import KV_TYPES

    return list(KV_TYPES)


@command
def compile_command(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder (config.json, *.safetensors) or .pt2 file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the artifact."), Writes("artifact", folder=True)
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="Target name or .toml file; see `fastcar targets`.", autocompletion=target_names),
        MayRead(),
    ] = "zcu102",
    tokens_per_frame: Annotated[
        int | None, typer.Option(help="Tokens of one frame; default: the model's config.")
    ] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Positions of the KV cache; default: the model's.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows decoded together.")] = 1,
    quant: Annotated[
        str | None,
        typer.Option(
            help="none, bf16, w8a8 or w4a8; default: w8a8 where the target has an accelerator.",
            autocompletion=quant_names,
        ),
    ] = None,
    gate: Annotated[
        str,
        typer.Option(
            help="What decides: tas, input_delta, bound, learned; always, never, random.", autocompletion=gate_names
        ),
    ] = "tas",
    gate_weights: Annotated[Path | None, typer.Option(help="Weights of gate learned, .safetensors.")] = None,
    threshold: Annotated[
        str | None, typer.Option(help="A number, inf, -inf, or one per layer; default: the gate's.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Query heads of gate tas: 0,2; or 0,2/all/3:1,1:-1 per layer.")
    ] = None,
    refresh_every: Annotated[int | None, typer.Option(help="Every n-th frame computes everything.")] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            help="What the accelerator computes: mlp; linears (also projections and head); all (the step). "
            "Default: all where it can, or linears where that is faster; else mlp."
        ),
    ] = None,
    max_chain: Annotated[int | None, typer.Option(help="Replays in a row at one slot at most.")] = None,
    couple_cfg: Annotated[bool, typer.Option("--couple-cfg", help="Guidance pairs replay together.")] = False,
    no_replay: Annotated[bool, typer.Option("--no-replay", help="Compile the dense decoder.")] = False,
    window: Annotated[int | None, typer.Option(help="Sparse attention: attend to this many last tokens.")] = None,
    sinks: Annotated[int | None, typer.Option(help="... and to this many first ones; default: 16.")] = None,
    window_positions: Annotated[
        str | None, typer.Option(help="Rotary positions with a window: absolute (default), or cache.")
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            help="What keys and values are cached as: float32 (default), float16, int8 (default with --offload all).",
            autocompletion=kv_names,
        ),
    ] = None,
    numerics: Annotated[
        str | None,
        typer.Option(help="native, or exact: equal bits on every backend; for w8a8 and w4a8 with --kv int8."),
    ] = None,
    host_cpus: Annotated[
        str, typer.Option(help="Instruction sets to carry libraries for: native,avx512-vnni,avx2,neon ...")
    ] = "native",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be built; write nothing. Needs no weights.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse whatever runs in another way than asked for.")
    ] = False,
    as_json: JsonOption = False,
) -> ExitCode:
    """Compile a trained decoder to an artifact.

    With --dry-run, say what would be compiled.
    """
    import fastcar_compile as fc
    from fastcar_compile.targets import load_target, require_buildable

    require_buildable(load_target(target))  # cheap refusals come before the model is read
    replay = None
    if not no_replay:
        rule: dict[str, Any] = {"max_chain": max_chain, "refresh_every": refresh_every, "couple_cfg": couple_cfg}
        rule |= {"gate": gate, "gate_weights": gate_weights}
        replay = parse_replay(rule, threshold, heads)
    options: dict[str, Any] = {
        "target": target,
        "tokens_per_frame": tokens_per_frame,
        "max_seq_len": max_seq_len,
        "batch_size": batch_size,
        "quant": quant,
        "replay": replay,
        "offload": offload,
        "sparse_attention": parse_sparse(window, sinks, window_positions),
        "kv": kv,
        "numerics": numerics,
        "host_cpus": [name.strip() for name in host_cpus.split(",")],
        "strict": strict,
    }
    if dry_run:
        return _dry_run(model, options, as_json)
    if output is None:
        raise UserError("there is no folder for the artifact", hint="give --output FOLDER, or --dry-run")
    with stages(as_json, "compile") as show:
        show("checking the model")
        artifact = fc.compile(load_model(model), dry_run=False, output=str(output), **options)
    _show_artifact(artifact, as_json)
    return ExitCode.OK


def _dry_run(model: Path, options: dict[str, Any], as_json: bool) -> ExitCode:
    """Print the report; the exit code says whether `compile` would build the artifact."""
    import fastcar_compile as fc
    from fastcar_compile.cli.dry_run import show_dry_run

    with stages(as_json, "dry run") as show:
        show("checking the model")
        report = fc.compile(load_model(model, weights=False), dry_run=True, **options)
    if as_json:
        print_json(report.to_json())
    else:
        show_dry_run(report)
    return ExitCode.OK if report.ok else ExitCode.USER_ERROR


def _show_artifact(artifact: Artifact, as_json: bool) -> None:
    sites, files = len(artifact.sites), artifact.manifest.files
    size = sum(entry.size for entry in files.values())
    if as_json:
        print_json(
            {"path": artifact.path, "sites": sites, "files": len(files), "bytes": size, "digest": artifact.digest}
        )
        return
    able = sum(site.replay is not None for site in artifact.sites)
    print_text(
        f"{artifact.path}: {able} of {count_text(sites, 'layer')} may replay, "
        f"{count_text(len(files), 'file')}, {size_text(size)}\n{artifact.digest}"
    )


def parse_replay(options: dict[str, Any], threshold: str | None, heads: str | None) -> ReplayConfig:
    """Return the replay of --threshold, --heads and the options that need no reading; the gate's threshold by default.

    Raises:
        UserError: a threshold or a head is no number. CompileError: a value is not valid.
    """
    from fastcar_compile.config import ReplayConfig

    read: dict[str, Any] = {} if threshold is None else {"threshold": parse_thresholds(threshold)}
    return ReplayConfig(**read, **options, heads=None if heads is None else parse_heads(heads))


def parse_sparse(window: int | None, sinks: int | None, positions: str | None) -> SparseAttention | None:
    """Return the sparse attention of --window, --sinks and --window-positions; None without a window.

    Raises:
        UserError: sinks or positions without a window. CompileError: a value is not valid.
    """
    from fastcar_compile.config import SparseAttention

    given = {"sinks": sinks, "positions": positions}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if window is not None:
        return SparseAttention(window=window, **options)
    if options:
        flags = {"sinks": "--sinks", "positions": "--window-positions"}
        what = f"{' and '.join(flags[name] for name in options)} given without --window"
        raise UserError(what, hint="give --window too, for example --window 256")
    return None


def load_model(path: Path, *, weights: bool = True) -> Any:
    """Return the model at `path`: the program of a .pt2 file, or a Hugging Face folder, checked but not yet read.

    Only local files are read, and only safetensors for weights. Without `weights`, a folder may have none.

    Raises:
        UserError: nothing usable is there.
    """
    if not path.exists():
        raise UserError("the model does not exist", where=str(path), hint=model_hint(path))
    if path.is_dir():
        from fastcar_compile.frontend.config_folder import open_folder

        return open_folder(path, weights=weights)
    if path.suffix != ".pt2":
        raise UserError(
            "the model is neither a folder nor a .pt2 file",
            where=str(path),
            hint="give a Hugging Face folder (config.json and *.safetensors), or torch.export.save(...) to a .pt2 file",
        )
    from fastcar_compile.frontend.pt2 import load_exported

    return load_exported(path)
