"""A matrix of decoders, targets, precisions and gates: speed beside measured quality, a row each, as CSV or page."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Self

import numpy as np
from pydantic import Field

from fastcar_compile.compiler import compile as compiled
from fastcar_compile.config.models import Config, ReplayConfig
from fastcar_compile.config.targets import load_target, read_toml
from fastcar_compile.errors import InputError, UserError, os_errors
from fastcar_compile.frontend.huggingface import read_module
from fastcar_compile.runtime.session import Session
from fastcar_compile.support.values import read_arrays, refuse_pipe, reporter, token_table
from fastcar_compile.tune.evaluate import Study
from fastcar_compile.tune.journal import Journal, are_rows
from fastcar_compile.tune.slices import WORKERS_HINT
from fastcar_compile.tune.workers import Workers

_HINT = "examples/sweep/sweep.toml is a matrix"


class Videos(Config):
    """Files of videos, .npy, int64 [N, T]: thresholds are chosen on some, and others judge them."""

    calibration: str
    held_out: str
    prompt: int = Field(default=1, ge=1)


class Matrix(Config):
    """What is compared: every combination. Paths are relative to the matrix's own file.

    Args:
        models: Hugging Face folders. targets: boards and CPUs.
        quants, offloads: as `compile` takes them; "auto" is its choice.
        gates: names; `learned:FILE` has the weights of a file.
        replay: shares of the forwards t >= F that replay; 0 is the dense decoder.
        options: others of `compile` that all have, such as tokens_per_frame.
        videos: without them there is no quality, and nothing is calibrated.
    """

    models: tuple[str, ...] = Field(min_length=1)
    targets: tuple[str, ...] = ("cpu",)
    quants: tuple[str, ...] = ("w8a8",)
    gates: tuple[str, ...] = ("input_delta",)
    replay: tuple[float, ...] = (0.5, 0.8)
    offloads: tuple[str, ...] = ("auto",)
    options: dict[str, int] = Field(default_factory=dict)
    videos: Videos | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the matrix of a TOML file, its paths made absolute.

        Raises:
            UserError: the file cannot be read. CompileError: a field is not valid.
        """
        data, folder = read_toml(path, "matrix", UserError, _HINT), path.resolve().parent
        found = cls(**data)
        videos = found.videos
        if videos is not None:
            files = {name: str(folder / getattr(videos, name)) for name in ("calibration", "held_out")}
            videos = videos.model_copy(update=files)
        gates = []
        for name, _, file in (gate.partition(":") for gate in found.gates):
            gates.append(f"{name}:{folder / file}" if file else name)
        models = tuple(str(folder / model) for model in found.models)
        return found.model_copy(update={"models": models, "gates": tuple(gates), "videos": videos})


@dataclass(frozen=True)
class ExploredCase:
    """A part of a matrix that one worker does: plain values, for JSON.

    Attributes:
        kind: "speed" or "quality". gate: as in a Matrix. shares: the matrix's `replay`. target, offload: of speed.
        videos: of quality, the fields of `Videos`. options: the matrix's.
    """

    kind: str
    model: str
    quant: str
    gate: str
    shares: tuple[float, ...]
    target: str = ""
    offload: str = ""
    videos: Mapping[str, Any] | None = None
    options: Mapping[str, int] | None = None

    @property
    def replay(self) -> ReplayConfig:
        """The gate, at its own threshold."""
        gate, _, file = self.gate.partition(":")
        return ReplayConfig(gate=gate, **({"gate_weights": file} if file else {}))


def tasks_of(matrix: Matrix) -> list[ExploredCase]:
    """Return the tasks of a matrix. A quality is that of every board."""
    found, common = [], {"shares": matrix.replay, "options": matrix.options}
    for model, quant, gate in product(matrix.models, matrix.quants, matrix.gates):
        if matrix.videos is not None:
            found.append(ExploredCase("quality", model, quant, gate, videos=matrix.videos.to_json(), **common))
        for target, offload in product(matrix.targets, matrix.offloads):
            found.append(ExploredCase("speed", model, quant, gate, target=target, offload=offload, **common))
    return found


def answer(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Do a task, `asdict` of it; return a row for each share.

    What cannot be built, or has no such video, is a row with its `problem`.
    """
    given = ExploredCase(**task)
    try:
        return [*(_speed(given) if given.kind == "speed" else _quality(given))]
    except UserError as error:
        return [{"problem": error.what} for _ in given.shares]


def answered(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a task beside its name. A worker calls it."""
    return {"task": json.dumps(task, sort_keys=True), "rows": answer(task)}


def _speed(task: ExploredCase) -> Iterator[dict[str, Any]]:
    options: dict[str, Any] = dict(task.options or {}) | {"quant": task.quant, "replay": task.replay}
    if task.offload != "auto":
        options["offload"] = task.offload
    if load_target(task.target).kind == "cpu":
        yield from _measured(task, options)
        return
    report = compiled(task.model, target=task.target, dry_run=True, **options)
    if not report.speed:
        raise InputError(f"no accelerator of {task.target} computes {task.quant} weights", hint="w8a8 or w4a8")
    dense, problem = report.speed[0], "; ".join(problem.what for problem in report.problems)
    for share in task.shares:
        found = report.predict(share)
        names = ("tokens_per_second", "energy_per_token_j", "bound_by")
        yield {
            "offload": report.options.offload,
            **{name: getattr(found, name) for name in names},
            "over_dense": found.tokens_per_second / dense.tokens_per_second,
            **({"problem": problem} if problem else {}),
        }


def _measured(task: ExploredCase, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Build for this machine's CPU, and decode the second frame of three videos for each share; the fastest counts.

    Which forwards replay is drawn, so that it is the share that was asked for; the gate's own score is not computed.
    """
    options["replay"] = ReplayConfig(gate="random", threshold=0.0)
    with TemporaryDirectory() as folder:
        artifact = compiled(task.model, target=task.target, output=Path(folder) / "artifact", **options)
        session, rows = artifact.session(), artifact.config.batch_size
        frame, speeds = artifact.config.tokens_per_frame, list[float]()
        for share in (0.0, *task.shares):
            session.set_threshold(share)
            speeds.append(max(_second_frame(session, rows, frame) for _ in range(3)))
    for speed in speeds[1:]:
        yield {"tokens_per_second": speed, "over_dense": speed / speeds[0], "bound_by": "measured"}


def _second_frame(session: Session, rows: int, frame: int) -> float:
    """Return the tokens/s of a video's second frame, all rows together."""
    last = session.generate(np.zeros((rows, 1), np.int64), frame)[:, -1:]
    start = perf_counter()
    session.generate(last, frame, reset=False)
    return rows * frame / (perf_counter() - start)


def _quality(task: ExploredCase) -> Iterator[dict[str, Any]]:
    assert task.videos is not None
    model, prompt = read_module(Path(task.model)), task.videos["prompt"]
    sizes = {"quant": task.quant, "tokens_per_frame": (task.options or {}).get("tokens_per_frame"), "prompt": prompt}
    study = Study(model, _videos(task.videos["held_out"]), decoder=Path(task.model).name, **sizes)
    ratios = [share for share in task.shares if share]
    dense, *cases = study.plan(_videos(task.videos["calibration"]), [task.replay], ratios, ["calibrated"])
    rows = iter(study.rows(cases))
    for share in task.shares:
        row = next(rows) if share else study.rows([dense])[0]
        names = ("replay_ratio", "mlp_weights_spared", "nll", "token_agreement")
        yield {name: row[name] for name in names} | {"nll_of_dense": float(row["nll"]) / row["nll_dense"]}


def _videos(path: str) -> np.ndarray:
    arrays = read_arrays(Path(path), "videos", "give a .npy file, int64 [N, T]")
    return token_table("the videos", next(iter(arrays.values()), []))


def explore(
    matrix: Matrix,
    *,
    executor: Executor | None = None,
    journal: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for every combination of a matrix, in its order, whatever worker was first.

    Args:
        executor: whose workers do the tasks; they see the files at the same paths. None: this process.
        journal: a file that keeps every row; an interrupted exploration goes on from it.
        progress: called with a line for each task that is done.

    Raises:
        UserError: a file cannot be read, or a task failed on two workers; the journal keeps what is done.
    """
    say, tasks, workers = reporter(progress), tasks_of(matrix), Workers.of(executor, None)
    right = partial(are_rows, count=len(matrix.replay))
    book = Journal(None if journal is None else Path(journal), _key(matrix), "exploration", "rows", right)
    waiting: dict[str, Future[Any] | None] = {}
    for task in tasks:
        name = _name(task)
        if book.find(name) is None and name not in waiting:
            waiting[name] = None if workers is None else workers.given(answered, asdict(task))
    for number, task in enumerate(tasks, 1):
        name = _name(task)
        if name in waiting:
            future, given = waiting.pop(name), asdict(task)
            found = workers.result(future, answered, given) if workers and future else answered(given)
            if not isinstance(found, dict) or found.get("task") != name or not right(found.get("rows")):
                raise UserError(f"a worker gave what cannot be the rows of {name:.200}", hint=WORKERS_HINT)
            book.add(name, found["rows"])
        say(f"{number} of {len(tasks)}: {task.kind} of {Path(task.model).name}, {task.quant}, {task.gate}")
    return [*_rows(matrix, tasks, book)]


def _rows(matrix: Matrix, tasks: Sequence[ExploredCase], book: Journal) -> Iterator[dict[str, Any]]:
    """Yield each board's speed beside the quality of its decoder, precision and gate."""
    quality = {(t.model, t.quant, t.gate): book.find(_name(t)) for t in tasks if t.kind == "quality"}
    for task in tasks:
        if task.kind == "quality":
            continue
        beside = quality.get((task.model, task.quant, task.gate), [{} for _ in matrix.replay])
        facts = {"model": "/".join(Path(task.model).parts[-2:]), "target": task.target, "quant": task.quant}
        facts |= {"gate": task.gate.partition(":")[0], "offload": task.offload}
        for share, speed, row in zip(matrix.replay, book.find(_name(task)), beside, strict=True):
            problem = "; ".join(filter(None, (speed.get("problem"), row.get("problem"))))
            yield facts | {"target_replay": share} | row | speed | {"problem": problem}


def _name(task: ExploredCase) -> str:
    return json.dumps(asdict(task), sort_keys=True)


def _key(matrix: Matrix) -> str:
    """Return the SHA-256 of every file that a row depends on, and of the version."""
    digest = hashlib.sha256(version("fastcar_compile").encode())
    files = [file for model in matrix.models for file in sorted(Path(model).glob("*")) if file.is_file()]
    files += [Path(gate.partition(":")[2]) for gate in matrix.gates if ":" in gate]
    files += [] if matrix.videos is None else [Path(matrix.videos.calibration), Path(matrix.videos.held_out)]
    for file in files:
        with os_errors("the file cannot be read", file):
            refuse_pipe(file)
            with file.open("rb") as stream:
                digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


Rows = Sequence[Mapping[str, Any]]

_COLUMNS = {
    "model": "decoder",
    "target": "target",
    "quant": "weights",
    "offload": "offload",
    "gate": "gate",
    "target_replay": "replay asked",
    "replay_ratio": "replay measured",
    "nll_of_dense": "NLL of dense",
    "tokens_per_second": "tokens/s",
    "over_dense": "over dense",
    "bound_by": "bound by",
    "problem": "problem",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }}
body {{ margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem; }}
figure {{ background: #fff; margin: 1rem 0; overflow-x: auto; }} svg {{ height: auto; max-width: 100%; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ border-bottom: 1px solid #8886; padding: .25rem .6rem; text-align: left; white-space: nowrap; }}
td.problem {{ white-space: normal; }}
tr.front {{ font-weight: 600; }} tr.front td:first-child::before {{ content: "★ "; }}
</style></head><body><h1>{title}</h1><p>{text}</p><figure>{svg}</figure><div class="wide">{table}</div></body></html>
"""


def front(rows: Rows) -> list[int]:
    """Return the rows that no other one beats in both tokens/s and quality, the fastest first; none has a problem."""
    able = [i for i, row in enumerate(rows) if not row["problem"]]
    found, best = list[int](), float("inf")
    for i in sorted(able, key=lambda i: (-rows[i]["tokens_per_second"], _loss(rows[i]))):
        if _loss(rows[i]) < best:
            found.append(i)
            best = _loss(rows[i])
    return found


def _loss(row: Mapping[str, Any]) -> float:
    """Return what is to be small: the NLL, or where nothing was measured the share that replays."""
    return float(row.get("nll", row["target_replay"]))


def table(rows: Rows) -> str:
    """Return the rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def page(rows: Rows, title: str) -> str:
    """Return the page: a plot and a table. The same rows give the same bytes.

    Raises:
        UserError: matplotlib is missing.
    """
    best = front(rows)
    measured = any("nll" in row for row in rows)
    text = f"{len(rows)} combinations. ★: no other one is both faster and better by its "
    text += "NLL on the held-out videos." if measured else "share that replays; quality was not measured."
    text += " Tokens/s are at the replay that was asked for: predicted for a board, measured on a CPU."
    shown = {name: label for name, label in _COLUMNS.items() if any(row.get(name) for row in rows)}
    head = "".join(f"<th>{label}</th>" for label in shown.values())
    lines = "".join(_line(row, i in best, shown) for i, row in enumerate(rows))
    parts = {"title": escape(title), "text": text, "svg": _plot(rows, best, measured)}
    return _PAGE.format(**parts, table=f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")


def _line(row: Mapping[str, Any], best: bool, shown: Mapping[str, str]) -> str:
    cells = "".join(f'<td class="{name}">{escape(_cell(row.get(name)))}</td>' for name in shown)
    return f'<tr class="front">{cells}</tr>' if best else f"<tr>{cells}</tr>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)


def _plot(rows: Rows, best: Sequence[int], measured: bool) -> str:
    """Return an SVG: a colour for each decoder, precision and gate, a marker for each target; the front is a line."""
    from fastcar_compile.support.packages import pyplot

    plt, text = pyplot(), io.StringIO()
    with plt.rc_context({"svg.hashsalt": "fastcar", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(9.6, 4.8), layout="constrained")
        able = [row for row in rows if not row["problem"]]
        series: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Mapping[str, Any]]] = {}
        for row in able:
            kind, board = (row["model"], row["quant"], row["gate"]), (row["target"], row["offload"])
            series.setdefault((kind, board), []).append(row)
        kinds, boards = (list(dict.fromkeys(pair[i] for pair in series)) for i in (0, 1))
        for (kind, board), own in series.items():
            marker, colour = "osD^vP*X"[boards.index(board) % 8], f"C{kinds.index(kind) % 10}"
            points = [[r["tokens_per_second"] for r in own], [_loss(r) for r in own]]
            axes.plot(*points, marker=marker, color=colour, linestyle=":", label=", ".join((*kind, *board)))
        axes.plot([rows[i]["tokens_per_second"] for i in best], [_loss(rows[i]) for i in best], color="#444", zorder=0)
        axes.set_xlabel("tokens/s")
        axes.set_ylabel("NLL per token, held-out" if measured else "share of t ≥ F that replays")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
