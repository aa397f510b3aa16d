"""Wavefront decoding against PyTorch: one forward over the whole sequence, with a mask made from first principles."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Made, check_module
from decoders import SIZES, llama
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

import fastcar_compile as fc
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import CompileError, InputError
from fastcar_compile.report.page.tables import speed_page

GRID, LEAD, FRAMES = (3, 4), 1, 3
SIZE, FRAME = GRID[0] * GRID[1], GRID[0] * GRID[1] + LEAD
LENGTH = FRAME * FRAMES + 1
EXACT: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "offload": "all"}
NATIVE: dict[str, Any] = {}
EXACT_HOST: dict[str, Any] = {"quant": "w8a8", "kv": "int8", "numerics": "exact"}
BACKENDS = [("eager", "native"), ("cpu", "native"), ("onnxruntime", "native"), ("eager", "exact"), ("cpu", "exact")]
BACKENDS.append(("hls-csim", "exact"))


def decoder(window: int | None = None) -> Any:
    if window is None:
        return llama(head_dim=32)
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, head_dim=32, sliding_window=window)).eval()


def build(
    folder: Path, options: dict[str, Any], rows: int | None = 4, window: int | None = None, **others: Any
) -> fc.Artifact:
    return fc.compile(
        decoder(window), **{"target": "cpu", **options}, tokens_per_frame=FRAME, max_seq_len=LENGTH, batch_size=2,
        rows=rows, prefill_chunk=2, replay=fc.ReplayConfig(threshold=0.0), output=folder, **others,
    )  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "native": {"options": NATIVE, "wavefront": fc.Wavefront(GRID, 2, LEAD)},
    "exact": {"options": EXACT},
    "native raster": {"options": NATIVE, "rows": None},
    "exact raster": {"options": EXACT_HOST, "rows": None},
}
"""Rows enough for lag 1, and none, with native and with exact numerics."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fc.Artifact]:
    return Made(lambda kind: build(tmp_path_factory.mktemp("wavefront") / "a", **KINDS[kind]))


def prompt() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 17, (2, FRAME + LEAD))


class Reference:
    """Greedy decoding of one video: a token sees what comes before it in raster order and was read by then.

    Attributes:
        tokens: prompt and what follows. logits: of every token that was chosen, in the order of the choices.
    """

    def __init__(self, ids: np.ndarray, count: int, lag: int, window: int | None = None) -> None:
        self.model, self.lag, self.logits, self.window = decoder(window), lag, list[Tensor](), window or LENGTH
        self.tokens = [int(i) for i in ids]
        wanted = len(ids) + count
        while len(self.tokens) < wanted:
            if (len(self.tokens) - 1) % FRAME == LEAD and len(self.tokens) > len(ids):
                self._grid()
            if len(self.tokens) < wanted:
                self.tokens.append(self._choose(self._forward(self.tokens, [])[-1]))
        self.new = self.tokens[len(ids) : wanted]

    def _forward(self, ids: list[int], queries: list[tuple[int, int]], places: list[int] | None = None) -> Tensor:
        return forward(self.model, ids, self.lag, queries, places, self.window)

    def _choose(self, logits: Tensor) -> int:
        self.logits.append(logits)
        return int(logits.argmax())

    def _grid(self) -> None:
        """The frame's other tokens, each as soon as the token before it in its image row was read."""
        before, (height, width), lag = self.tokens[:-1], GRID, self.lag
        start, tokens = len(before), {0: self.tokens[-1]}
        for n in range(lag * (height - 1) + width):
            read = [p for p in sorted(tokens) if p % width + lag * (p // width) <= n]
            places, ids = [start + p for p in read], before + [tokens[p] for p in read]
            plain = self._forward(ids, [], places)[len(before) :]
            for y in range(height):
                place = y * width + n - lag * y
                inside = 0 <= n - lag * y < width and place + 1 < SIZE
                if inside and (place % width < width - 1 or lag == width):
                    tokens[place + 1] = self._choose(plain[read.index(place)])
                if n == lag * (y + 1) - 1 and lag < width and y < height - 1:
                    query = [(y * width + lag - 1, (y + 1) * width - 1)]
                    tokens[(y + 1) * width] = self._choose(self._forward(ids, query, places)[-1])
        self.tokens = before + [tokens[p] for p in range(SIZE)]


def keep(chosen: list[np.ndarray], logits: np.ndarray) -> np.ndarray:
    """Choose greedily."""
    chosen.append(logits)
    return logits.argmax(-1)


def launch_of(position: int, lag: int) -> tuple[int, int]:
    """When a token is read: its frame and forward, the leads before the grid."""
    frame, place = divmod(position, FRAME)
    place -= LEAD
    return (frame, place if place < 0 else place % GRID[1] + lag * (place // GRID[1]))


def forward(
    model: Any,
    tokens: list[int],
    lag: int,
    queries: list[tuple[int, int]],
    places: list[int] | None = None,
    window: int = LENGTH,
) -> Tensor:
    """Logits [T, V] of tokens at positions 0, 1, 2, …, but for the last ones, which are at `places`, and of queries."""
    places = places or []
    before = len(tokens) - len(places)
    positions = [*range(before), *places]
    raster = [p < FRAME + LEAD for p in positions]  # the prompt is read in raster order
    start = places[0] if places else 0
    ids = tokens + [tokens[positions.index(start + token)] for token, _ in queries]
    at = positions + [start + place for _, place in queries]
    seen = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for i, p in enumerate(at):
        mine = launch_of(p, lag) if i < len(positions) else max(launch_of(start + t, lag) for t, _ in queries)
        for j, q in enumerate(positions):
            earlier = launch_of(q, lag) <= mine or raster[j]
            seen[i, j] = p - window < q <= p and (earlier or (i < len(positions) and raster[i]))
        seen[i, i] = True
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return model(torch.tensor([ids]), attention_mask=mask, position_ids=torch.tensor([at])).logits[0]


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.thorough), "cpu", "onnxruntime"])
@pytest.mark.parametrize("lag", [1, 2, *(pytest.param(lag, marks=pytest.mark.thorough) for lag in (3, 4))])
def test_tokens_are_those_of_pytorch(artifacts: dict[str, fc.Artifact], backend: str, lag: int) -> None:
    session, chosen = artifacts["native"].session(backend), list[np.ndarray]()
    session.set_threshold(None)
    # The last frame ends with its last token: what follows it is not asked for.
    count = 2 * FRAME - LEAD
    got = session.generate(prompt(), count, partial(keep, chosen), wavefront=fc.Wavefront(GRID, lag, LEAD))
    for row, ids in enumerate(prompt()):
        expected = Reference(ids, count, lag)
        assert got[row].tolist() == expected.new
        actual = torch.from_numpy(np.stack(chosen)[:, row])
        torch.testing.assert_close(actual, torch.stack(expected.logits), atol=1e-4, rtol=0)


@pytest.mark.thorough
def test_a_window_shows_what_is_known(tmp_path: Path) -> None:
    """The cache is a ring, which turns within the frames that are decoded."""
    window, count, found = 14, 2 * FRAME - LEAD, list[np.ndarray]()
    check_module("hls4ml")
    for options, backends in ((NATIVE, ("cpu", "onnxruntime", "eager")), (EXACT, ("cpu", "eager", "hls-csim"))):
        artifact = build(tmp_path / str(len(found)), options, window=window)
        assert {s.shape[2] for s in artifact.manifest.decoder.state if s.role == "key_cache"} == {window + FRAME - 1}
        for backend, lag in product(backends, (1, 2)):
            session, chosen = artifact.session(backend), list[np.ndarray]()
            session.set_threshold(None)
            got = session.generate(prompt(), count, partial(keep, chosen), wavefront=fc.Wavefront(GRID, lag, LEAD))
            if options is NATIVE:
                assert [row.tolist() for row in got] == [Reference(ids, count, lag, window).new for ids in prompt()]
            else:
                found.append(np.stack(chosen))
    for lag in (0, 1):
        assert np.array_equal(found[lag], found[2 + lag])
        assert np.array_equal(found[lag], found[4 + lag])


def test_an_artifact_says_its_order(artifacts: dict[str, fc.Artifact], tmp_path: Path) -> None:
    """`generate` follows it; a list of prompts of one length is no reason not to."""
    made, text = fc.load(artifacts["native"].path), "3 x 4 tokens, lag 2: 9 decode steps a frame, 13 in raster order"
    found = []
    for order in (None, fc.Wavefront(GRID, 2, LEAD), fc.Wavefront(GRID, 4, LEAD)):
        session = made.session("cpu")
        found.append(session.generate(list(prompt()), 2 * FRAME - LEAD, wavefront=order).tolist())
        assert text in repr(session)
    assert found[0] == found[1] != found[2]
    assert f"order: wavefront over {text}" in made.explain()
    fc.inspect(made, tmp_path / "page.html")
    assert text in (tmp_path / "page.html").read_text()
    report: Any = build(tmp_path / "a", NATIVE, rows=None, wavefront=fc.Wavefront(GRID, 2, LEAD), dry_run=True)
    assert report.decoder.rows == 3
    with pytest.raises(CompileError, match=r"(?s)3 x 4 tokens and 0 in front.*lag 1 needs 3 rows .* has 1"):
        build(tmp_path / "a", NATIVE, rows=1, wavefront=fc.Wavefront(GRID, 1), dry_run=True)


@pytest.mark.parametrize(
    ("backend", "numerics"),  # whole steps are compared below
    [p if p == ("cpu", "native") else pytest.param(*p, marks=pytest.mark.thorough) for p in BACKENDS[:-1]],
)
def test_as_much_lag_as_columns_is_raster(artifacts: dict[str, fc.Artifact], backend: str, numerics: str) -> None:
    """With replay too: tokens and decisions of a decoder without rows."""
    found = []
    for name, wavefront in ((f"{numerics} raster", None), (numerics, fc.Wavefront(GRID, 4, LEAD))):
        session = artifacts[name].session(backend, record=True)
        tokens = session.generate(prompt(), SIZE + 1, fc.Sampling(temperature=1.0, seed=3), wavefront=wavefront)
        found.append((tokens, session.stats.decisions, session.position))
    for tokens, decisions, position in found[1:]:
        assert np.array_equal(tokens, found[0][0])
        assert np.array_equal(decisions, found[0][1])
        assert position == found[0][2] == FRAME + LEAD + SIZE


@pytest.mark.parametrize(
    ("numerics", "lag"),
    [
        ("native", 3),
        *(pytest.param(*p, marks=pytest.mark.thorough) for p in (("native", 1), ("exact", 1), ("exact", 3))),
    ],
)
def test_backends_decide_alike(artifacts: dict[str, fc.Artifact], numerics: str, lag: int) -> None:
    check_module("hls4ml")
    found = []
    for backend in [name for name, kind in BACKENDS if kind == numerics]:
        session = artifacts[numerics].session(backend, record=True)
        tokens = session.generate(prompt(), 2 * FRAME - LEAD, wavefront=fc.Wavefront(GRID, lag, LEAD))
        found.append((tokens, session.stats.decisions))
    assert 0.1 < found[0][1].mean() < 0.9
    for tokens, decisions in found[1:]:
        assert np.array_equal(tokens, found[0][0])
        assert np.array_equal(decisions, found[0][1])


def test_what_does_not_fit_is_refused(artifacts: dict[str, fc.Artifact], tmp_path: Path) -> None:
    session = artifacts["native raster"].session("cpu")
    with pytest.raises(InputError, match=r"lag 2 needs 3 rows of each video, the decoder has 1\n.*rows=3"):
        session.generate(prompt(), 4, wavefront=fc.Wavefront(GRID, 2, LEAD))
    with pytest.raises(InputError, match=r"3 x 4 tokens and 0 in front has 12, the decoder's has 13"):
        session.generate(prompt(), 4, wavefront=fc.Wavefront(GRID, 2))
    with pytest.raises(InputError, match=r"lag is 5\n.*\n.*at most 4"):
        fc.Wavefront(GRID, 5)
    with pytest.raises(CompileError, match="batch_size 2 and rows 20 are 40 rows"):
        build(tmp_path / "a", NATIVE, rows=20)


@pytest.mark.thorough
def test_the_page_predicts_a_decode_step_of_all_rows(artifacts: dict[str, fc.Artifact]) -> None:
    session = artifacts["exact"].session("cpu", record=True)
    session.generate(prompt(), 2 * FRAME - LEAD, wavefront=fc.Wavefront(GRID, 1, LEAD))
    recorded, stored = session.stats.decisions, StoredArtifact(artifacts["exact"].path)
    facts = {fact["label"]: fact["value"] for fact in speed_page(stored, recorded)["facts"]}
    assert facts["workload"].startswith("w8a8, 2 videos of 4 rows with a position each, attention reads")
    assert facts["replay"].endswith("of all MLPs (drawn for the shares of the recorded decisions)")
    assert abs(float(facts["replay"].partition("%")[0]) / 100 - recorded.mean()) < 0.01
