"""Count lines, comments and imports of package, plug-in, tests and benchmarks, and lines of HLS and host sources.

    python tools/count_lines.py

Code is every line of a .py file that is not blank, not a comment alone and not part of a docstring; a text that
documents an attribute is code. Of HLS and host sources, code is every line that is not blank.
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = ("files", "lines", "code", "imports", "in bodies", "at module level")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
BODIES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def lines_of(nodes: Iterable[ast.stmt]) -> set[int]:
    """Return the numbers of the lines that statements span."""
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def count(path: Path) -> Counter[str]:
    """Return the figures of one .py file: comments count where they have a line of their own."""
    text = path.read_text("utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    bodies = [n for n in nodes if isinstance(n, BODIES)]
    docstrings = lines_of(n.body[0] for n in nodes if isinstance(n, BODIES | ast.Module) and ast.get_docstring(n))
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)} - docstrings
    imports, inside = lines_of(n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)), lines_of(bodies)
    comments = {t.start[0] for t in tokens if t.type == tokenize.COMMENT} - code
    sizes = (1, len(text.splitlines()), len(code), len(imports), len(comments & inside), len(comments - inside))
    return Counter(dict(zip(COLUMNS, sizes, strict=True)))


def rows() -> Iterator[tuple[str, Counter[str]]]:
    """Yield a title and its figures: the package's folders and its own files, then the totals."""
    folders, total = dict[str, Counter[str]](), Counter[str]()
    for path in sorted((ROOT / "fastcar_compile").rglob("*.py")):
        first, *rest = path.relative_to(ROOT / "fastcar_compile").parts
        folders.setdefault(f"{first}/" if rest else "files at the top", Counter()).update(found := count(path))
        total.update(found)
    yield from sorted(folders.items())
    yield "fastcar_compile", total
    plays = {*(ROOT / "tests" / "play").rglob("*.py")}
    yield "tests", sum(map(count, {*(ROOT / "tests").rglob("*.py")} - plays), Counter[str]())
    yield "play", sum(map(count, (ROOT / "play").rglob("*.py")), Counter[str]())
    yield "tests/play", sum(map(count, plays), Counter[str]())
    yield "benchmarks", sum(map(count, (ROOT / "benchmarks").rglob("*.py")), Counter[str]())
    sources = [p for p in (ROOT / "hls_templates").rglob("*") if p.suffix in (".h", ".hpp", ".cpp", ".sv", ".j2")]
    lines = [line for path in sources for line in path.read_text("utf-8").splitlines()]
    yield "hls_templates", Counter(files=len(sources), lines=len(lines), code=sum(bool(x.strip()) for x in lines))


if __name__ == "__main__":
    print(f"{'':18}" + "".join(f"{name:>16}" for name in (*COLUMNS, "import share")))
    for title, figures in rows():
        figure = "".join(f"{figures[name]:>16,}" for name in COLUMNS)
        print(f"{title:18}{figure}{figures['imports'] / figures['code']:>16.1%}")
