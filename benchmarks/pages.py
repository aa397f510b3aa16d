"""Tables of docs/measurements. A command writes its table between two markers; other words are the page's own."""

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements"
END = "<!-- end -->"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table that ends with a line break."""
    lines = [f"| {' | '.join(map(str, cells))} |\n" for cells in (columns, *rows)]
    return "".join([lines[0], "|---" * len(columns) + "|\n", *lines[1:]])


def write_table(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marker `<!-- NAME … -->` and the next `<!-- end -->` of a page."""
    before, marker, rest = page.read_text("utf-8").partition(f"<!-- {name}")
    marker_end, closed, after = rest.partition(END)
    if not closed:
        raise SystemExit(f"{page} has no markers of {name!r}")
    head = marker_end.partition("-->")[0]
    page.write_text(f"{before}{marker}{head}-->\n\n{text.strip()}\n\n{END}{after}", "utf-8")
