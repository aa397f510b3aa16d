"""What the DRS controller writes for one layer, as 32-bit words (docs/reference/drs_table.md, "Calls")."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.drs.simulator import LayerTrace
from fastcar_compile.drs.table import MAX_ROWS, Status

SCORES, CHAIN = 4, 4 + MAX_ROWS
"""First words of the scores and of the chain counts; before them: status, Index Register, two spare words."""

RESULT_WORDS = CHAIN + MAX_ROWS


def read_result(words: NDArray[Any], rows: int) -> LayerTrace:
    """Return what the controller decided for `rows` rows of the batch; words uint32."""
    status, register = (int(word) for word in words[:2])
    # With another status nothing was decided: the words of scores and chain counts mean nothing then.
    decided = rows if Status(status) is Status.OK else 0
    return LayerTrace(
        status=Status(status),
        index_register=register,
        scores=tuple(words[SCORES : SCORES + decided].view(np.float32).tolist()),
        chain=tuple(words[CHAIN : CHAIN + decided].view(np.int32).tolist()),
    )
