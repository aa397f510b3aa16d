"""Measures the groups of the workloads "batch" and "prefill", one after the other."""

import json
import shutil
from collections.abc import Sequence

from fastcar_compile.support.machine import available_memory
from speed.batch_plan import BatchPlan, Size, together
from speed.batch_rows import Kept, rows_of
from speed.runner import Result, Say, Worker, prepare, run_group

SPARE = 2e9
"""Bytes that the engines leave to the system."""

REFERENCE = ("pytorch eager", "float32")


def measure(
    plan: BatchPlan, precisions: Sequence[str], sizes: Sequence[Size], kept: Kept, say: Say, keep: bool
) -> None:
    """Add the rows of all groups to `kept`. Delete a precision's files unless `keep`."""
    for precision in precisions:
        for size in sizes:
            say(f"{precision}, {size.workload} {size.number}")
            jobs = plan.jobs(precision, size)
            parts: list[list[Result]] = []
            for part in together(precision, jobs, available_memory() - SPARE):
                parts.append(run_group(part, say))
            kept.add(rows_of(precision, parts, _reference(plan, size, parts)))
        if not keep:
            shutil.rmtree(plan.folder / precision, ignore_errors=True)


def _reference(plan: BatchPlan, size: Size, parts: list[list[Result]]) -> list[float]:
    """Return PyTorch's float32 logits: those of this group, of an earlier one, or of an engine opened for them."""
    path = plan.folder / "reference" / f"{size.workload}-{size.number}.json"
    ran = [r.logits for part in parts for r in part if (r.job.engine, r.job.precision) == REFERENCE and not r.reason]
    if not ran and path.exists():
        return json.loads(path.read_text("utf-8"))
    if not ran:
        job = next(j for j in plan.jobs("float32", size) if (j.engine, j.precision) == REFERENCE)
        prepare(job)
        worker = Worker(job)
        worker.close()
        ran = [worker.ready["logits"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ran[0]), "utf-8")
    return ran[0]
