"""A training log as JSON lines."""

import json
from pathlib import Path


class Log:
    """A log of one file. An interrupted training goes on in the same file: entries after its checkpoint are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        """Keep the entries up to `step`, the step of the checkpoint; 0: begin anew."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [entry for entry in read_log(path) if entry["step"] <= step] if path.exists() else []
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        self._earlier = max((entry["seconds"] for entry in kept), default=0.0)

    def append(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Add and print one entry. `seconds` are those since this process began to train."""
        rounded = {name: round(value, 5) for name, value in values.items()}
        line = json.dumps({"step": step, "seconds": round(self._earlier + seconds), **rounded})
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the entries of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]
