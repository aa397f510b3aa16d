"""`explore`: rows in the matrix's order whatever worker is first, a journal, problems as rows, the front, the page."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fastcar_compile import explore as exploration
from fastcar_compile.cli import app
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.explore import ExploredCase, Matrix, answer, explore, front, page, table, tasks_of

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "examples" / "moving_shapes" / "tuned" / "model")
VIDEOS = {name: str(ROOT / "examples" / "sweep" / f"{name}.npy") for name in ("calibration", "held_out")}


class LastFirst(Executor):
    """Does what was submitted last first, when the first result is asked for, from JSON."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Lazy, Callable[..., Any], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_kwargs: Any) -> Future[Any]:
        future = Lazy(self)
        self.waiting.append((future, fn, json.loads(json.dumps(args[0]))))
        return future


class Broken(Executor):
    """Its workers die."""

    def submit(self, fn: Callable[..., Any], /, *_args: Any, **_kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_exception(BrokenExecutor("a worker died"))
        return future


class Lazy(Future[Any]):
    def __init__(self, executor: LastFirst) -> None:
        super().__init__()
        self.executor = executor

    def result(self, timeout: float | None = None) -> Any:
        while self.executor.waiting:
            future, function, argument = self.executor.waiting.pop()
            future.set_result(function(argument))
        return super().result(timeout)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[ExploredCase]:
    """Tasks in the order in which they were done, by a worker that only names them."""
    done: list[ExploredCase] = []

    def fake(task: dict[str, Any]) -> list[dict[str, Any]]:
        done.append(ExploredCase(**{**task, "shares": tuple(task["shares"])}))
        if task["kind"] == "quality":
            return [{"nll": 1 + share, "nll_of_dense": 1 + share} for share in task["shares"]]
        return [{"tokens_per_second": 10 + share + len(task["target"]), "offload": "all"} for share in task["shares"]]

    monkeypatch.setattr(exploration, "answer", fake)
    return done


def matrix(**others: Any) -> Matrix:
    sizes: dict[str, Any] = {"models": [MODEL], "targets": ["kv260", "zcu102"], "quants": ["w8a8", "w4a8"]}
    return Matrix(**{**sizes, "gates": ["tas"], "replay": [0.0, 0.5], "videos": VIDEOS, **others})


def test_workers_change_nothing(answered: list[ExploredCase], tmp_path: Path) -> None:
    alone = explore(matrix(), journal=tmp_path / "journal")
    assert answered == tasks_of(matrix())
    names = ("target", "quant", "target_replay", "nll")
    cells = product(("w8a8", "w4a8"), ("kv260", "zcu102"), (0.0, 0.5))
    assert [tuple(r[n] for n in names) for r in alone] == [(t, q, share, 1 + share) for q, t, share in cells]
    assert explore(matrix(), executor=LastFirst()) == alone
    assert answered[len(answered) // 2 :] == tasks_of(matrix())[::-1]
    with pytest.raises(UserError, match="failed twice on the workers of Broken"):
        explore(matrix(), executor=Broken())
    answered.clear()
    # The same matrix is answered from the journal; a board more is two tasks more.
    assert explore(matrix(), journal=tmp_path / "journal") == alone
    assert not answered
    explore(matrix(targets=["kv260", "zcu102", "u280"]), journal=tmp_path / "journal")
    assert [task.target for task in answered] == ["u280", "u280"]
    # Other videos make every row anew.
    explore(matrix(videos={**VIDEOS, "held_out": VIDEOS["calibration"]}), journal=tmp_path / "journal")
    assert len(answered) == 2 + len(tasks_of(matrix()))


class Lying(Executor):
    """Gives one answer to every task."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_kwargs: Any) -> Future[Any]:
        future, found = Future[Any](), fn(*args)
        future.set_result(self.given(found) if callable(self.given) else self.given)
        return future


@pytest.mark.usefixtures("answered")
def test_what_are_no_rows_reaches_no_journal(tmp_path: Path) -> None:
    """Wrong types, NaN, and the rows of another task; a damaged entry of the journal is named with its line."""
    path, nan = tmp_path / "journal", float("nan")
    first: list[Any] = []
    explore(matrix(), executor=Lying(lambda found: first.append(found) or found))
    for lie in (
        *(None, "x", [], {"rows": []}),
        lambda found: found | {"task": "of another one"},
        lambda found: found | {"rows": found["rows"][1:]},
        lambda found: found | {"rows": [{"nll": nan}] * 2},
        lambda found: found | {"rows": [{"tokens_per_second": -1.0}] * 2},
        lambda found: found | {"rows": [{"nll": [1]}] * 2},
        lambda found: first[0] if found != first[0] else found,
    ):
        with pytest.raises(UserError, match="a worker gave what cannot be the rows of"):
            explore(matrix(), executor=Lying(lie), journal=path)
    kept = json.loads(path.read_text())
    assert list(kept["rows"]) == [first[0]["task"]]
    explore(matrix(), journal=path)
    text = path.read_text().replace('"nll": 1.5', '"nll": NaN', 1)
    path.write_text(text)
    with pytest.raises(UserError, match="an entry of the journal is damaged") as caught:
        explore(matrix(), journal=path)
    assert int(caught.value.where.rpartition(" ")[2]) <= text[: text.index("NaN")].count("\n")


def test_what_cannot_be_is_a_row_with_its_problem() -> None:
    rows = explore(matrix(targets=["nowhere"], quants=["w8a8"], videos=None))
    assert all("unknown target 'nowhere'" in row["problem"] for row in rows)
    assert front(rows) == []


@pytest.mark.thorough
def test_a_cpu_is_measured() -> None:
    dense, all_replay = answer(
        asdict(ExploredCase("speed", MODEL, "w8a8", "tas", (0.0, 1.0), target="cpu", offload="auto"))
    )
    assert dense["bound_by"] == "measured"
    assert all_replay["tokens_per_second"] / all_replay["over_dense"] > 0
    assert all_replay["over_dense"] > dense["over_dense"]  # all MLPs of the second frame are spared


def test_a_matrix_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    for text, error, what in (
        ("models = [", UserError, "the matrix is not valid TOML"),
        ("models = []\nboards = []", CompileError, "boards"),
        ('models = ["m"]\n[videos]\ncalibration = "c"', CompileError, "held_out"),
    ):
        file.write_text(text, "utf-8")
        with pytest.raises(error, match=what):
            Matrix.load(file)
    file.write_text('models = ["m"]\ngates = ["learned:g.safetensors"]', "utf-8")
    found = Matrix.load(file)
    assert (found.models, found.gates) == ((f"{tmp_path}/m",), (f"learned:{tmp_path}/g.safetensors",))
    with pytest.raises(UserError, match="cannot be read"):
        explore(found)


POINT = st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans())


@given(st.lists(POINT, max_size=12))
def test_the_front_is_what_no_other_row_beats(points: list[tuple[int, int, bool]]) -> None:
    rows = [{"tokens_per_second": s, "nll": n, "problem": "x" * p, "target_replay": 0.0} for s, n, p in points]
    best = front(rows)
    able = [i for i, row in enumerate(rows) if not row["problem"]]

    def beaten(i: int, j: int) -> bool:
        mine, other = ((rows[k]["tokens_per_second"], -rows[k]["nll"]) for k in (i, j))
        return other != mine and other[0] >= mine[0] and other[1] >= mine[1]

    assert not any(beaten(i, j) for i in best for j in able)
    assert all(any(beaten(i, j) or points[i][:2] == points[j][:2] for j in best) for i in able)


def test_the_page_is_its_rows(answered: list[ExploredCase]) -> None:
    rows = explore(matrix(models=[MODEL]))
    rows[0]["problem"] = "<b>"
    text = page(rows, "a & b")
    assert text == page(rows, "a & b")
    assert "<h1>a &amp; b</h1>" in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert text.count('<tr class="front">') == len(front(rows))
    assert len(table(rows).splitlines()) == 1 + len(rows)
    assert answered


@pytest.mark.thorough
def test_the_example_runs(tmp_path: Path) -> None:
    """For one of its boards. Its decoder was tuned for replay, so 80 % cost little."""
    (tmp_path / "moving_shapes").symlink_to(ROOT / "examples" / "moving_shapes")
    matrix = Path(shutil.copytree(ROOT / "examples" / "sweep", tmp_path / "sweep")) / "sweep.toml"
    boards = '"zcu102", "kv260", "u280"'
    text = matrix.read_text("utf-8")
    assert boards in text
    matrix.write_text(text.replace(boards, '"u280"'), "utf-8")
    result = CliRunner().invoke(app, ["explore", str(matrix), "-o", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert [row["target"] for row in rows] == ["u280"] * 2
    assert all(1 < row["nll_of_dense"] < 1.3 and 0.6 < row["replay_ratio"] < 0.9 for row in rows[1::2])
    assert all(row["over_dense"] > 1 and not row["problem"] for row in rows[1::2])
    assert "<svg" in (tmp_path / "index.html").read_text("utf-8")
