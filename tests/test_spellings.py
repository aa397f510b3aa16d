"""Decoders in the many ways that users write them: each decodes as the module does, or is refused by name."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import agreement
import pytest
import torch
from conftest import first_often
from decoders import PlainBlock, PlainDecoder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session

IDS = torch.randint(0, 11, (1, 8), generator=torch.Generator().manual_seed(1))
PROMPT = 3


def decoder(
    mlp: Callable[[PlainBlock, Tensor], Tensor] | None = None,
    logits: Callable[[PlainDecoder, Tensor], Tensor] | None = None,
) -> PlainDecoder:
    """One layer, with another MLP, or with something behind the head."""
    own, behind = mlp or PlainBlock.mlp, logits or (lambda _model, y: y)

    class Block(PlainBlock):
        def mlp(self, x: Tensor) -> Tensor:
            return own(self, x)

    class Decoder(PlainDecoder):
        block = Block

        def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
            return behind(self, super().forward(input_ids, cache_position))

    return Decoder(layers=1)


def expected(model: nn.Module) -> Tensor:
    """Logits float32 [1, T - prompt + 1, V] of the module, token by token."""
    with torch.inference_mode():
        found = [model(IDS[:, i : i + 1], torch.tensor([i]))[:, -1].float() for i in range(IDS.shape[1])]
    return torch.stack(found, 1)[:, PROMPT - 1 :]


def captured(model: nn.Module) -> DecoderProgram:
    sizes = {"batch_size": 1, "max_seq_len": 33, "tokens_per_frame": 4, "prefill_chunk": 4}
    return run_pipeline(capture(model, **sizes), analysis_pipeline())


def decoded(model: nn.Module) -> Tensor:
    program = captured(model)
    return agreement.decode(Session(EagerStepper(program), program.config, [None]), IDS, PROMPT)


def between(function: Callable[[Tensor], Tensor]) -> Callable[[PlainBlock, Tensor], Tensor]:
    return lambda block, x: block.down(function(block.up(x)))


NONLINEARITIES = ("mish", "leaky_relu", "relu6", "hardswish", "elu", "selu", "celu", "softplus", "hardsigmoid")
NONLINEARITIES += ("hardtanh", "logsigmoid", "softsign")


@pytest.mark.parametrize("name", first_often(NONLINEARITIES, 2))
def test_an_mlp_has_any_nonlinearity(name: str) -> None:
    model = decoder(between(getattr(F, name)))
    torch.testing.assert_close(decoded(model), expected(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("function", "activation"),
    first_often(
        [
            (lambda x: x / (1 + torch.exp(-x)), "silu"),
            (lambda x: torch.sin(30 * x), "sin"),
            (lambda x: x * F.relu6(x + 3) / 6, "relu6"),
            (lambda x: x**3, "pow"),
            (lambda x: torch.where(x > 0, x, x / 9), "gt"),
        ],
        2,
    ),
)
def test_a_nonlinearity_by_hand(function: Callable[[Tensor], Tensor], activation: str) -> None:
    (site,) = captured(decoder(between(function))).sites
    assert (site.mlp.activation.split(",")[0], site.mlp.gated) == (activation, False)


class Gated(PlainBlock):
    """Gate and up in one linear."""

    def __init__(self, width: int, rows: int, batch: int) -> None:
        super().__init__(width, rows, batch)
        self.down = nn.Linear(width, width)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x)))


class GatedByProduct(Gated):
    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(gate * up)


@pytest.mark.parametrize(("kind", "gated", "activation"), [(Gated, True, "sigmoid"), (GatedByProduct, False, "mul")])
def test_gate_and_up_in_one_linear(kind: type[PlainBlock], gated: bool, activation: str) -> None:
    """Where nothing tells which half is the gate, the linear stays one."""

    class Decoder(PlainDecoder):
        block = kind

    model = Decoder(layers=1)
    (site,) = captured(model).sites
    assert (site.mlp.gated, site.mlp.intermediate, site.mlp.activation.split(",")[0]) == (gated, 32, activation)
    torch.testing.assert_close(decoded(model), expected(model), atol=1e-5, rtol=0)


def in_half(_model: PlainDecoder, y: Tensor) -> Tensor:
    return y.half().type_as(y) + (y.double() * 2).float() + y.to("cpu", torch.bfloat16).to(torch.zeros(1))


def with_wide_table(_model: PlainDecoder, y: Tensor) -> Tensor:
    return (y * torch.linspace(1, 2, 11, dtype=torch.float64)).type("torch.FloatTensor")


def in_autocast(block: PlainBlock, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return PlainBlock.mlp(block, x).float()


CASTS: list[Any] = [
    (lambda: decoder(logits=in_half), nullcontext, 0.05),
    (PlainDecoder, lambda: torch.autocast("cpu", dtype=torch.bfloat16), 1e-5),
    (lambda: decoder(logits=with_wide_table), nullcontext, 1e-5),
    (lambda: decoder(in_autocast), nullcontext, 0.05),
    (lambda: decoder().half(), nullcontext, 0.02),
    (lambda: decoder().double(), nullcontext, 1e-5),
]


@pytest.mark.parametrize(("build", "around", "tolerance"), first_often(CASTS, 2))
def test_a_step_computes_in_float32(
    build: Callable[[], nn.Module], around: Callable[[], AbstractContextManager[object]], tolerance: float
) -> None:
    model = build()
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    with around():
        program = captured(model)
    values = [n.meta["val"] for n in program.graph_module.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert {v.dtype for v in values if v.is_floating_point()} == {torch.float32}
    session = Session(EagerStepper(program), program.config, [None] * program.config.num_layers)
    wanted = decoded(model) if isinstance(around(), torch.autocast) else None
    found = agreement.decode(session, IDS, PROMPT)
    if next(model.parameters()).dtype == torch.float32:
        torch.testing.assert_close(found, expected(model) if wanted is None else wanted, atol=tolerance, rtol=0)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes


class Inferring(PlainDecoder):
    @torch.inference_mode()
    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        return super().forward(input_ids, cache_position)


@pytest.mark.parametrize("make", first_often([Inferring, PlainDecoder, lambda: PlainDecoder().half()]))
def test_a_model_from_inference_mode(make: Callable[[], nn.Module]) -> None:
    """Its tensors take no part in a capture, which is around in the same mode too."""
    with torch.inference_mode():
        model, plain = make(), make().float()
        program = captured(model)
    assert all(tensor.is_inference() for tensor in model.parameters())
    session = Session(EagerStepper(program), program.config, [None] * program.config.num_layers)
    torch.testing.assert_close(agreement.decode(session, IDS, PROMPT), expected(plain), atol=1e-5, rtol=0)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def normalised(model: PlainDecoder) -> PlainDecoder:
    (block,) = model.blocks
    assert isinstance(block, PlainBlock)
    parametrizations.weight_norm(block.up)
    parametrizations.spectral_norm(block.down)
    parametrize.register_parametrization(block.down, "bias", Doubled())
    parametrize.register_parametrization(model.head, "weight", Doubled())
    return model.eval()


def test_computed_weights_become_parameters() -> None:
    model = normalised(decoder())
    program = captured(model)
    (site,) = program.sites
    assert all("_folded_" in name for name in site.mlp.weights)
    for module in program.graphs():
        names = {str(n.target) for n in module.graph.find_nodes(op="get_attr")}
        assert len([name for name in names if "_folded_" in name]) == 2
    torch.testing.assert_close(decoded(model), expected(model), atol=1e-5, rtol=0)


def head_of_last_row(_model: PlainDecoder, y: Tensor) -> Tensor:
    return y[:, [-1]]


def mapped(_model: PlainDecoder, y: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * 2)(y)


def reinterpreted(_model: PlainDecoder, y: Tensor) -> Tensor:
    return y.view(torch.int32).float()


@pytest.mark.parametrize(
    ("logits", "what"),
    [
        (head_of_last_row, "the step returns shape (1, 1, 11); expected [B, T, V] or [B, T, H], with B = 1 and T = 4"),
        (mapped, "the forward calls torch.func.vmap, which takes a function"),
        (reinterpreted, "the forward reads the bits of a tensor as another type"),
    ],
)
def test_what_is_no_step_is_refused_by_name(logits: Any, what: str) -> None:
    with pytest.raises(CompileError, match=re.escape(what)) as refusal:
        captured(decoder(logits=logits))
    assert "test_spellings.py:" in refusal.value.where


def test_a_head_on_the_last_position_alone_reads_prompts_token_by_token() -> None:
    model = decoder(logits=head_of_last_row)
    program = run_pipeline(
        capture(model, batch_size=1, max_seq_len=33, tokens_per_frame=4, prefill_chunk=1), analysis_pipeline()
    )
    session = Session(EagerStepper(program), program.config, [None])
    torch.testing.assert_close(agreement.decode(session, IDS, PROMPT), expected(model), atol=1e-5, rtol=0)


def test_backends_compute_what_pytorch_decomposes(tmp_path: Path) -> None:
    """TVM has no mish and no logsigmoid."""
    model = decoder(between(F.mish), lambda model, y: F.logsigmoid(in_half(model, y)))
    options: dict[str, Any] = {"tokens_per_frame": 4, "max_seq_len": 33, "prefill_chunk": 1, "replay": None}
    artifact = fc.compile(model, "cpu", output=tmp_path / "artifact", **options)
    for backend in ("cpu", "onnxruntime"):
        found = agreement.decode(artifact.session(backend), IDS, PROMPT)
        # ONNX has the logarithm of a sigmoid, and the error of onnxruntime's sigmoid is absolute.
        tolerance = 1e-3 if backend == "onnxruntime" else 1e-5
        torch.testing.assert_close(found, decoded(model), atol=tolerance, rtol=0)
