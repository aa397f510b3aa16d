"""What every pass is about: files of check lines, as MLIR and xDSL have them, matched against a graph before and after.

A file says `DECODER:` (one of `DECODERS`), `AFTER:` (the passes that ran before; `analysis` is the analysis pipeline),
`RUN:` (the pass), `BEFORE:` lines that the program must match before it, and `CHECK:` lines for the program after it.
filecheck's directives (`CHECK-NEXT`, `CHECK-NOT`, `{{regular expression}}`, `[[NAME:…]]`) work in both.
"""

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from filecheck.matcher import Matcher
from filecheck.options import Options
from gates.drafts import layer_of_draft
from torch import Tensor, nn

from fastcar_compile.artifact.programs import graph_file_text, read_graph_file
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.gates.draft import Draft
from fastcar_compile.ir.pass_manager import Pass, pipeline_from_string, pipeline_to_string, run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.text import program_to_text
from fastcar_compile.passes.insert_drafts import InsertDrafts
from fastcar_compile.passes.pipeline import PASSES, analysis_pipeline

from .laws import everything, nodes_of, without_sources
from .test_normalize_state import Batched
from .tiny import (
    BATCH,
    CHUNK,
    FRAME,
    ROWS,
    WIDTH,
    Fused,
    Products,
    RootMeanSquare,
    Rotated,
    TinyBlock,
    TinyDecoder,
    Windowed,
)

FILES = sorted((Path(__file__).parent / "filecheck").glob("*.txt"))


class WrittenOut(TinyBlock):
    """x * sigmoid(x) by hand."""

    def feed(self, x: Tensor) -> Tensor:
        x = self.mlp.up(x)
        return self.mlp.down(x * torch.sigmoid(x))


class Normalised(TinyBlock):
    """The rows of a weight have length 1."""

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp.down(torch.relu(nn.functional.linear(x, nn.functional.normalize(self.mlp.up.weight))))


class Parallel(TinyBlock):
    """Attention and MLP read one norm; the MLP is computed first."""

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        x = self.norm_1(h)
        return self.mlp(x) + self.out(self.attend(x, position)) + h


class Folded(TinyBlock):
    """Residual stream and MLP over rows [B * T, H], as transformers' OPT has them."""

    def forward(self, h: Tensor, position: Tensor) -> Tensor:
        h = h + self.out(self.attend(self.norm_1(h), position))
        rows = h.reshape(-1, WIDTH)
        return (rows + self.mlp.down(torch.relu(self.mlp.up(self.norm_2(rows))))).view(h.shape)


class Divided(RootMeanSquare):
    """The norm as a quotient, and the weight as the first factor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / torch.sqrt(1e-6 + x.square().mean(-1, keepdim=True)))


class Spelled(TinyBlock):
    """Root-mean-square norms in two spellings."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.norm_1, self.norm_2 = Divided(), nn.RMSNorm(WIDTH, eps=1e-5)


class Moments(nn.LayerNorm):
    """A layer norm by mean and variance."""

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(input, -1, correction=0, keepdim=True)
        return (input - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Lengths(RootMeanSquare):
    """The norm by the length of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * WIDTH**0.5 * self.weight


class Measured(TinyBlock):
    """Norms by moments and by lengths."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.norm_1, self.norm_2 = Moments(WIDTH), Lengths()


DECODERS: dict[str, tuple[type[TinyBlock], ...]] = {
    "spelled": (Spelled,), "measured": (Measured,),
    "tiny": (TinyBlock,), "window": (Windowed,), "rotated": (Rotated,), "two-layers": (TinyBlock, TinyBlock),
    "written-out": (WrittenOut,), "products": (Products,), "fused": (Fused,), "parallel": (Parallel,),
    "folded": (Folded,), "batched": (Batched,), "normalised": (Normalised,),
}  # fmt: skip


def directive(text: str, name: str) -> str:
    """What stands behind `name:`; empty where the file does not say it."""
    found = re.search(rf"^{name}: *(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


@cache
def captured(decoder: str) -> DecoderProgram:
    """One of `DECODERS`, whose table of embeddings has bfloat16 values."""
    model = TinyDecoder(*DECODERS[decoder])
    model.embed.weight.data = model.embed.weight.data.bfloat16().float()
    return capture(model, batch_size=BATCH, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=CHUNK)


def prepared(text: str) -> DecoderProgram:
    """The program of a file before its pass."""
    program = copy.deepcopy(captured(directive(text, "DECODER")))
    analysis = pipeline_to_string(analysis_pipeline())
    before = directive(text, "AFTER").replace("analysis", analysis)
    return run_pipeline(program, pipeline_from_string(before, PASSES))


def pass_of(text: str) -> Pass:
    """The pass of a file. A draft is no text, so insert-drafts gets one with 3 neurons and rank 2 for layer 0."""
    (item,) = pipeline_from_string(directive(text, "RUN"), PASSES)
    return replace(item, draft=Draft.of({0: layer_of_draft(WIDTH, 3, 2)})) if isinstance(item, InsertDrafts) else item


def check(path: Path, prefix: str, program: DecoderProgram, folder: Path) -> None:
    """Match a listing against the lines of one prefix."""
    listing = folder / f"{prefix}.txt"
    listing.write_text(without_sources(program_to_text(program)))
    options = Options(match_filename=str(path), input_file=str(listing), check_prefixes=[prefix])
    assert Matcher.from_opts(options).run() == 0, listing.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_check_lines(path: Path, tmp_path: Path) -> None:
    """Before the pass, and after it ran over the graph file that the program was saved as."""
    text = path.read_text()
    program = prepared(text)
    check(path, "BEFORE", program, tmp_path)
    saved = tmp_path / "graph.json"
    saved.write_text(graph_file_text(program))
    # repeat-layers copies layers of a decoder whose weights are not there; the others may look at values.
    weights = {} if directive(text, "RUN").startswith("repeat-layers") else dict(program.params)
    loaded = read_graph_file(saved, weights, missing_on_meta=True)
    run_pipeline(loaded, [pass_of(text)])
    check(path, "CHECK", loaded, tmp_path)


@pytest.mark.parametrize("path", [f for f in FILES if f.stem != "repeat-layers"], ids=lambda path: path.stem)
def test_a_pass_says_what_it_did(path: Path) -> None:
    """It modifies a program once, and every operator that it inserts keeps the user's source and module. Layers are
    repeated where their weights are not there: tests/test_checkpoint.py."""
    text = path.read_text()
    program, item = prepared(text), pass_of(text)
    start = everything(program)
    assert item.apply(program) is True
    first = everything(program)
    assert first != start
    made = [n for n in nodes_of(program) if n.meta.get("made_by") == item.name and n.op == "call_function"]
    assert [n.name for n in made if not {"stack_trace", "nn_module_stack", "val"} <= set(n.meta)] == []
    if item.name in ("insert-replay", "insert-drafts"):
        with pytest.raises(CompileError, match="ran already"):
            item.apply(program)
    else:
        assert item.apply(program) is False
    assert everything(program) == first


def test_every_pass_has_check_lines() -> None:
    runs = [directive(path.read_text(), "RUN").partition("{")[0] for path in FILES]
    assert set(runs) == set(PASSES)
