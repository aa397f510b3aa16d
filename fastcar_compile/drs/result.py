"""What the DRS controller writes: status, decisions and dispatch records, as 32-bit words.

docs/reference/drs_table.md, "One call".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.drs.simulator import DispatchRecord, LayerTrace
from fastcar_compile.drs.table import MAX_ROWS, NO_LAYER, Status

SCORES, CHAIN = 4, 4 + MAX_ROWS
"""First words of the scores and of the chain counts; before them: status, count, Index Register, held layer."""

RESULT_WORDS = CHAIN + MAX_ROWS
"""Words before the records, of two words each."""


def read_result(words: NDArray[Any], rows: int) -> LayerTrace:
    """Return what the controller decided for `rows` rows of the batch; words uint32."""
    status, count, register, held = (int(word) for word in words[:SCORES])
    records = words[RESULT_WORDS : RESULT_WORDS + 2 * count].reshape(-1, 2)
    decided = rows if Status(status) in (Status.OK, Status.QUEUE_FULL) else 0
    return LayerTrace(
        status=Status(status),
        index_register=register,
        scores=tuple(words[SCORES : SCORES + decided].view(np.float32).tolist()),
        chain=tuple(words[CHAIN : CHAIN + decided].view(np.int32).tolist()),
        records=tuple(DispatchRecord.from_words(int(word), int(argument)) for word, argument in records),
        held=None if held == NO_LAYER else held,
    )
