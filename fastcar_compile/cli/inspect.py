"""`fastcar inspect`, `diff`, `sign`, `verify-signature`: what an artifact holds, what differs, and whose it is."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix
from pathlib import Path, PurePosixPath
from posixpath import basename, dirname
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

import fastcar_compile as fc
from fastcar_compile.artifact.explain import decoder_fields, gate_text
from fastcar_compile.artifact.layout import SIGNATURE
from fastcar_compile.cli.common import ExitCode, JsonOption, Writes, command, stages
from fastcar_compile.cli.options import ArtifactArgument, existing, require_one
from fastcar_compile.cli.output import print_fields, print_result, print_table, print_text
from fastcar_compile.config.listing import Needs
from fastcar_compile.errors import InputError, UserError, count_text, names_text, size_text
from fastcar_compile.support import limits

if TYPE_CHECKING:
    from fastcar_compile.artifact.sections import HostSection
    from fastcar_compile.artifact.trust import SignatureReport
    from fastcar_compile.report.comparison import Change


@command
def inspect_command(
    artifact: ArtifactArgument,
    sites: bool = False,
    before: bool = False,
    after: bool = False,
    explain: bool = False,
    layer: Annotated[int | None, Needs("explain")] = None,
    node: Annotated[str | None, Needs("explain")] = None,
    html: Annotated[Path | None, Writes("page")] = None,
    trace: Annotated[Path | None, Needs("html")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show an artifact: summary, layers, graphs or reasons.

    With --html, write all of it as a page.

    Args:
        sites: The layers found, and where.
        before: The decode graph before the passes.
        after: The decode graph after the passes.
        explain: What was inserted, and why.
        layer: With --explain: only this layer.
        node: With --explain: only this node.
        html: Write all of it as one self-contained page into this file.
        trace: With --html: recorded decisions (.npy of `fastcar run --trace`).
    """
    from fastcar_compile.codegen.hls.model.question import load_trace

    require_one({"--sites": sites, "--before": before, "--after": after, "--explain": explain, "--html": html})
    require_one({"--layer": layer, "--node": node})
    with stages(as_json, "inspect", "checking the files") as show:
        loaded = fc.load(artifact)
        if html is not None:
            show("writing the page")
            fc.inspect(loaded, html, None if trace is None else load_trace(existing(trace, "trace")))
    if html is not None:
        size = html.stat().st_size
        text = f"{html}: {size_text(size)}; open it in a browser"
        print_result(as_json, {"html": html, "bytes": size}, lambda: print_text(text))
    elif sites:
        rows = loaded.manifest.layers.model_dump(mode="json")["layers"]
        print_result(as_json, {"sites": rows}, lambda: _show_sites(rows))
    elif before or after:
        graph = graph_text(loaded.original_graph if before else loaded.graph)
        print_result(as_json, {"graph": graph}, lambda: print_text(graph))
    elif explain:
        reasons = loaded.explain(layer=layer, node=node)
        print_result(as_json, {"explain": reasons}, lambda: print_text(reasons))
    else:
        size = sum(entry.size for entry in loaded.manifest.files.values())
        facts = {"path": loaded.path, "bytes": size, "num_layers": len(loaded.manifest.layers.layers)}
        facts |= {"digest": loaded.digest, "signed": is_signed(loaded.path)}
        print_result(as_json, facts | loaded.manifest.model_dump(mode="json"), lambda: _show_summary(loaded, size))


def graph_text(graph: Any) -> str:
    """Return a graph as readable text: the generated code of a GraphModule, `str` of anything else."""
    return graph.print_readable(print_output=False) if hasattr(graph, "print_readable") else str(graph)


def _show_sites(rows: list[dict[str, Any]]) -> None:
    names = ("layer", "module_path", "hidden", "intermediate", "activation", "source")
    rows = [row | row["mlp"] | {"source": PurePosixPath(row["source"]).name} for row in rows]
    titles = (">layer", "module path", ">hidden", ">intermediate", "activation", "source")
    print_table(titles, ([row.get(name, "-") for name in names] for row in rows))


def host_lines(host: HostSection) -> list[str]:
    """Return one line for each CPU that the artifact has libraries for."""
    lines = [f"{v.instruction_set} ({v.triple})" for v in host.variants]
    if (board := host.board) is not None:
        kind = "the board's" if board.linked else "the board's, object files"
        lines.append(f"{board.cpu} ({board.triple}), {kind}")
    return lines


def is_signed(path: Path) -> bool:
    """Return whether an artifact has a signature, which need not hold."""
    return (path / SIGNATURE).exists()


def _show_summary(loaded: fc.Artifact, size: int) -> None:
    manifest = loaded.manifest
    counts = f"{count_text(len(manifest.layers.layers), 'layer')}, {count_text(len(manifest.files), 'file')}"
    print_text(f"{loaded.path}: {counts}, {size_text(size)}\n")
    fields, decoder = decoder_fields(manifest), manifest.decoder
    fields["gate"] = gate_text(manifest.layers.gates, manifest.thresholds_in_use)
    state, token = sum(decoder.state_bytes().values()), decoder.token_bytes()
    fields["a session"] = f"{size_text(state)} of states; `rewind` keeps {size_text(token)} of each token"
    if libraries := host_lines(manifest.host):
        fields["libraries"] = "; ".join(libraries)
    if is_signed(loaded.path):
        fields["signed"] = "by whom, `fastcar verify-signature` checks"
    fields["written by"] = ", ".join(f"{name} {version}" for name, version in sorted(manifest.producer.items()))
    print_fields(fields)
    print_text(f"\ndigest  {loaded.digest}\n")
    rows = _folders({name: entry.size for name, entry in manifest.files.items()})
    print_table(("folder", ">files", ">size", "kinds"), rows)


def _folders(sizes: Mapping[str, int]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each folder: the number of its files, their bytes, and how many there are of the usual kinds."""
    for folder, names in groupby(sorted(sizes, key=lambda name: (dirname(name), name)), key=dirname):
        files = list(names)
        kinds = Counter(PurePosixPath(name).suffix or basename(name) for name in files).most_common()
        text = ", ".join(f"{number} {kind}" for kind, number in kinds[:3]) + ", ..." * (len(kinds) > 3)
        yield f"{folder or '.'}/", len(files), size_text(sum(sizes[name] for name in files)), text


PARTS = "options,versions,figures,graphs,weights,sections,files"


@command
def diff_command(
    a: Path, b: Path, only: str = PARTS, rows: Annotated[int, Option(min=1)] = 20, as_json: JsonOption = False
) -> ExitCode:
    """Show what differs between artifacts or graph files.

    The exit code is 1 where anything does.

    Args:
        a: Folder of an artifact, or a graph file (.json).
        b: The other one.
        only: Parts, separated by commas.
        rows: Lines to show of each part; --json has all.
    """
    wanted, known = {name.strip() for name in only.split(",")}, PARTS.split(",")
    if wanted - {*known}:
        hint = f"parts: {names_text(known, min(wanted.difference(known)))}"
        raise UserError(f"--only {only!r} names an unknown part", hint=hint)
    with stages(as_json, "diff"):
        found = fc.diff(a, b)
    parts = {part: found.get(part, ()) for part in known if part in wanted}
    equal = not any(parts.values())
    lists = {part: [change._asdict() for change in changes] for part, changes in parts.items()}
    title = "equal" if equal else f"a: {a}\nb: {b}"
    print_result(as_json, {"a": a, "b": b, "equal": equal} | lists, lambda: _show_changes(title, parts, rows))
    return ExitCode.OK if equal else ExitCode.MISMATCH


def _show_changes(title: str, parts: Mapping[str, Sequence[Change]], rows: int) -> None:
    print_text(title)
    for part, changes in parts.items():
        if changes:
            print_text(f"\n{part}")
            cells = ((c.path + f" ({c.places})" * (c.places > 1), *_texts(c.a, c.b)) for c in changes[:rows])
            print_table(("what differs", "a", "b"), cells)
        if len(changes) > rows:
            print_text(f"… and {count_text(len(changes) - rows, 'more line')}; --rows N shows N, --json all")


def _texts(*values: object, width: int = 24) -> list[str]:
    """Return short texts: of long ones what follows their common beginning."""
    texts = ["-" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in values]
    same = len(commonprefix(texts)) if max(map(len, texts)) > width else 0  # noqa: RUF071
    texts = [f"...{text[same:]}" if same > 3 else text for text in texts]
    return [text if len(text) <= width else f"{text[: width - 3]}..." for text in texts]


PASSPHRASE = "FASTCAR_KEY_PASSPHRASE"
"""Environment variable with the passphrase of a private key."""

DigestOption = Annotated[str | None, typer.Option("--digest", help="Accept only this digest: sha256:...")]
KeyOption = Annotated[
    Path | None, typer.Option("--public-key", help="Accept only what the holder of this key (PEM) signed.")
]
RereadOption = Annotated[
    bool, typer.Option("--reread/--no-reread", help="Read large files that did not change since they were checked.")
]


@command
def sign_command(
    artifact: ArtifactArgument,
    key: Path | None = None,
    passphrase_file: Path | None = None,
    ask_passphrase: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Sign an artifact.

    The signature covers the manifest and every file, and lies in the artifact as signature.json.

    Args:
        key: Private key, PEM (openssl ecparam -name prime256v1 ...).
        passphrase_file: First line: the key's passphrase; default: FASTCAR_KEY_PASSPHRASE.
        ask_passphrase: Ask for it.
    """
    if key is None:
        raise UserError("no private key is given", hint="for example --key signing.pem")
    secret = _passphrase(passphrase_file, ask=ask_passphrase)
    with stages(as_json, "sign", "checking the files"):
        report = fc.sign(artifact, key, passphrase=secret)
    print_result(as_json, report.model_dump(mode="json"), lambda: _show_report(report))


@command
def verify_signature_command(
    artifact: ArtifactArgument,
    key: Path | None = None,
    digest: DigestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check who signed an artifact, and every file of it.

    The exit code is 2 unless everything that is asked for holds. Nothing of the artifact is loaded.

    Args:
        key: Public key of who must have signed, PEM.
    """
    with stages(as_json, "verify-signature", "checking the files"):
        report = fc.verify_signature(artifact, key, digest=digest)
    print_result(as_json, report.model_dump(mode="json"), lambda: _show_report(report))


def _passphrase(file: Path | None, *, ask: bool) -> str | None:
    """Return the key's passphrase; None: nobody gave one."""
    require_one({"--passphrase-file": file, "--ask-passphrase": ask})
    if file is not None:
        try:
            with file.open(encoding="utf-8") as stream:
                return stream.readline(limits.KEY_BYTES).rstrip("\n")
        except (OSError, ValueError) as error:
            hint = "give a text file whose first line is the passphrase"
            raise InputError(f"the passphrase cannot be read: {error}", where=str(file), hint=hint) from error
    if ask:
        return typer.prompt("Passphrase of the key", hide_input=True, err=True)
    return os.environ.get(PASSPHRASE)


def _show_report(report: SignatureReport) -> None:
    print_text(f"digest  {report.digest}\n")
    signed = {"trusted by": report.by, "signer": report.signer, "covers": count_text(report.files, "file")}
    print_fields({"artifact": str(report.path)} | signed)
