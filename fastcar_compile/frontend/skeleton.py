"""A Hugging Face model without values: shapes of its parameters, which layers are alike, and its first layers."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig

from fastcar_compile.errors import CompileError
from fastcar_compile.support import limits
from fastcar_compile.support.values import read_json

# The config.json of a Hugging Face folder, checked before Transformers reads it.
#
# Transformers checks some fields, computes with others before it checks them, and takes the rest as they are. So
# sizes,
# numbers and names that a decoder is built from are checked here; a field that is not there has Transformers'
# default.


CONFIG = "config.json"

_HINT_FILE = 'config.json needs "architectures": ["…ForCausalLM"] and "model_type", as save_pretrained writes them'
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_IMPLEMENTATIONS = (None, "eager", "sdpa")
_PARTS = ("text_config", "decoder")
"""Configs inside of the config that describe the decoder."""

_HINT_WEIGHTS = "give sizes whose weights fit memory"

_MOST_ELEMENTS = 1 << 34
"""Most elements of one weight: 64 GiB in float32. The embedding of 256,000 tokens of 16,384 has a quarter of that."""


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the checked content of config.json.

    Raises:
        CompileError: the file is missing, does not hold a JSON object, or has fields that no decoder can have, all at
            once.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise CompileError("the model folder has no config.json", where=str(folder), hint=_HINT_FILE)
    data = read_json(file, "model's config.json", CompileError, size=limits.CONFIG_BYTES, hint=_HINT_FILE)
    if not isinstance(data, dict):
        raise CompileError("config.json does not hold a JSON object", where=str(file), hint=_HINT_FILE)
    CompileError.raise_all([CompileError(what, where=str(file), hint=hint) for what, hint in _problems(data)])
    return data


def _problems(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return what is wrong, and how to correct it."""
    names = data.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        yield f"config.json names no architecture (architectures = {names!r:.80})", _HINT_FILE
    if "model_type" in data and not isinstance(data["model_type"], str):
        yield f"config.json says model_type = {data['model_type']!r:.80}", _HINT_FILE
    for prefix, part in _parts(data):
        yield from _field_problems(prefix, part)


def _parts(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", data
    yield from ((f"{name}.", data[name]) for name in _PARTS if isinstance(data.get(name), Mapping))


def _field_problems(prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    code = [name for name in part if name.endswith("_implementation") and part[name] not in _IMPLEMENTATIONS]
    wrong = dict.fromkeys(code, "leave it out: other implementations are code that Transformers would load")
    for names, is_allowed, hint in _FIELDS:
        wrong |= {name: hint for name in names if part.get(name) is not None and not is_allowed(part[name])}
    yield from ((f"config.json says {prefix}{name} = {part[name]!r:.80}", hint) for name, hint in wrong.items())
    yield from _weight_problems(part)


def _weight_problems(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the weights that are too large; building the model would ask for their memory."""

    def size(name: str) -> int:
        value = part.get(name)
        return value if type(value) is int and value > 0 else 1

    hidden = size("hidden_size")
    heads = max(size("num_attention_heads"), size("num_key_value_heads")) * size("head_dim")
    for name, other in (
        ("intermediate_size", size("intermediate_size")),
        ("vocab_size", size("vocab_size")),
        ("num_attention_heads * head_dim", heads),
    ):
        if hidden * other > _MOST_ELEMENTS:
            yield f"config.json implies a weight of hidden_size {hidden} x {name} {other}", _HINT_WEIGHTS


def _sizes(most: int, *names: str) -> tuple[tuple[str, ...], Callable[[Any], bool], str]:
    def is_size(value: Any) -> bool:
        listed = value if isinstance(value, list) else [value]  # some have one per layer
        return all(type(each) is int and 1 <= each <= most for each in listed)

    return names, is_size, f"give a whole number from 1 to {most}"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < limits.SIZE * limits.SIZE


_FIELDS: tuple[tuple[tuple[str, ...], Callable[[Any], object], str], ...] = (
    _sizes(limits.LAYERS, "num_hidden_layers"),
    _sizes(limits.SIZE, "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    _sizes(limits.SIZE, "vocab_size", "max_position_embeddings", "tokens_per_frame"),
    _sizes(1 << 20, "num_labels"),
    (
        ("rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "partial_rotary_factor"),
        _is_positive,
        "give a positive number",
    ),
    (("rope_scaling", "rope_parameters"), lambda value: isinstance(value, Mapping), "give an object, or leave it out"),
    (
        ("hidden_act", "hidden_activation", "activation_function"),
        lambda value: isinstance(value, str) and value in ACT2FN,
        "give the name of an activation that Transformers has, for example silu",
    ),
    (
        ("transformers_weights",),
        lambda value: isinstance(value, str) and re.fullmatch(r"[^/\\\0]+\.safetensors(\.index\.json)?", value),
        "give the name of a file of the folder, *.safetensors or *.safetensors.index.json",
    ),
    (
        ("torch_dtype", "dtype"),
        lambda value: isinstance(value, str) and value.removeprefix("torch.") in _DTYPES,
        f"give one of {', '.join(_DTYPES)}",
    ),
)
"""Fields that may be left out -> what is allowed in them, and a hint."""


@dataclass(frozen=True)
class StoredNames:
    """The names of a checkpoint.

    Args:
        stored: path in the model -> name in the files.
        converted: path in the model -> name in the files, where Transformers computes with what is stored, so that the
            stored tensor is not the parameter.
    """

    stored: dict[str, str]
    converted: dict[str, str]

    @classmethod
    def of(cls, model: PreTrainedModel, names: Iterable[str]) -> StoredNames:
        """Return the names of a checkpoint with these tensors, as `from_pretrained` of this model reads it.

        Transformers renames by the class of the model (GPT-NeoX is saved with `embed_out.weight`), and adds or takes
        away the name of the backbone, so that a backbone's checkpoint fits the model with a head, and the other way.
        """
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix, known = model.base_model_prefix, model.state_dict()
        stored: dict[str, str] = {}
        converted: dict[str, str] = {}
        # Where a name is there with and without the backbone's, Transformers takes the first in order.
        for name in sorted(names):
            path, converter = rename_source_key(name, renamings, converters, prefix, known)
            # The model has this name, and a rule would turn it into one that the model lacks: the name stays.
            if path not in known and name in known:
                path, converter = rename_source_key(name, [], [], prefix, known)
            if converter is None:
                stored.setdefault(path, name)
            else:
                converted |= dict.fromkeys(_targets(path, converter, converters), name)
        return cls(stored, converted)


def _targets(path: str, pattern: str, converters: list[WeightConverter]) -> list[str]:
    """The parameters that a conversion makes; `path` is the first of them."""
    rule = next(rule for rule in converters if pattern in rule.source_patterns)
    return [path.replace(rule.target_patterns[0], target) for target in rule.target_patterns]


_PLAIN = (bool, int, float, str, type(None))


def load_config(folder: Path) -> Any:
    """The transformers config of a folder.

    Raises:
        CompileError: transformers does not know the model type, a field does not fit it, or the config describes
            quantised weights.
    """
    where = str(folder / CONFIG)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        hint = "use a model type that this version of transformers knows, or give the module itself"
        raise CompileError(f"transformers cannot read config.json: {error}", where=where, hint=hint) from error
    except Exception as error:  # a config that does not fit its type: each model checks its own fields in its own way
        what = f"config.json does not fit its model type: {error.__cause__ or error}"
        raise CompileError(what, where=where, hint="correct the field named") from error
    if getattr(config, "quantization_config", None):
        hint = "give the unquantised checkpoint and choose quant= here"
        raise CompileError("config.json describes quantised weights", where=where, hint=hint)
    return config


class Skeleton:
    """The architecture of a config.

    Args:
        config: of transformers. architecture: class name, as config.json gives it. where: the folder, for error texts.

    Raises:
        CompileError: transformers has no such class, or cannot build it.
    """

    def __init__(self, config: Any, architecture: str, where: str) -> None:
        self.config, self.architecture, self.where = config, architecture, where
        # By name, and `_class` is Any: else pyright reads all of its models, which is a third of its time.
        kind = getattr(import_module("transformers"), architecture, None)
        if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)) or kind is PreTrainedModel:
            hint = "use an architecture that this version of transformers has, or give the module itself"
            raise CompileError(f"transformers has no architecture {architecture}", where=where, hint=hint)
        self._class: Any = kind
        self._own: Sequence[str] = ()
        self._full = self._build(config)

    def untie(self, names: Sequence[str]) -> None:
        """Give parameters that the config ties to others values of their own."""
        self._own = names
        self._full = self._build(self.config)

    def stored_names(self, names: Iterable[str]) -> StoredNames:
        """What tensors of these names in a checkpoint are called in the model."""
        return StoredNames.of(self._full, names)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters and persistent buffers, tied ones under each of their paths."""
        return {name: tuple(t.shape) for name, t in self._tensors().items()}

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Paths of the parameters."""
        return frozenset(n for n, _ in self._full.named_parameters(remove_duplicate=False))

    @property
    def parameter_groups(self) -> list[tuple[str, ...]]:
        """Paths of every parameter and persistent buffer; those that are tied together are one group."""
        groups: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self._tensors().items():
            # Tied parameters are one object under several paths.
            groups[id(tensor)].append(name)
        return [tuple(names) for names in groups.values()]

    def _tensors(self) -> dict[str, Tensor]:
        parameters = dict(self._full.named_parameters(remove_duplicate=False))
        names = self._full.state_dict().keys()
        buffers = {n: b for n, b in self._full.named_buffers() if n in names}
        return parameters | buffers

    @cached_property
    def layers_path(self) -> str | None:
        """Path of the list of decoder layers; None if it cannot be told."""
        decoder = self._full.get_decoder()
        lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == self.layers]
        if len(lists) != 1:
            return None
        return next(name for name, module in self._full.named_modules() if module is lists[0])

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(getattr(_decoder_config(self.config), "num_hidden_layers", 0) or 0)

    @property
    def captured_layers(self) -> int:
        """Layers to capture: the last `period` of them stand for all after them, and equal those before them."""
        return self._repetition[0]

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat; 1: all that follow the first ones are alike."""
        return self._repetition[1]

    @cached_property
    def _repetition(self) -> tuple[int, int]:
        """Layers to capture, and the period with which that are fewest.

        Layers are alike when their modules have the same classes, parameter shapes and plain attributes, their own
        index aside, and every per-layer list of the config gives them the same value. Two whole blocks are captured,
        and as many layers before them as the first ones that are of another kind, or that leave whole blocks.
        """
        total = self.layers
        if self.layers_path is None:
            return total, 1
        kinds = [self._kind(i, layer) for i, layer in enumerate(self._full.get_submodule(self.layers_path).children())]
        found = [(total, 1)]
        for period in range(1, total // 2 + 1):
            # From the layer behind the last odd one on, every layer equals the one a period later.
            odd = [i for i in range(total - period) if kinds[i] != kinds[i + period]]
            start = odd[-1] + 1 if odd else 0
            # Layers in front that are not alike, layers that leave
            # whole blocks behind them, and two blocks for the proof.
            found.append((start + (total - start) % period + 2 * period, period))
        return min(found)

    def _kind(self, index: int, layer: nn.Module) -> Any:
        described = []
        for path, module in layer.named_modules():
            # Plain attributes tell kinds apart that parameters do not, such as a sliding window or `is_causal`.
            plain = {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN) and k != "layer_idx"}
            tensors = {k: tuple(t.shape) for k, t in module.named_parameters(recurse=False)}
            described.append((path, type(module), plain, tensors))
        options = {k: v[index] for k, v in _per_layer(_decoder_config(self.config)).items()}
        return described, options

    def model(self, layers: int) -> PreTrainedModel:
        """The float32 model with its first layers only; parameters are fake tensors, buffers are real."""
        config = copy.deepcopy(self.config)
        decoder = _decoder_config(config)
        for name, values in _per_layer(decoder).items():
            setattr(decoder, name, values[:layers])
        decoder.num_hidden_layers = layers
        model = self._build(config)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                # Tied parameters stay tied: one fake tensor for both paths.
                if id(value) not in made:
                    with mode:
                        made[id(value)] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype), requires_grad=False)
                module._parameters[name] = made[id(value)]
        return model.eval()

    def _build(self, config: Any) -> PreTrainedModel:
        try:
            with _parameters_on_meta():
                # `_from_config` honours the dtype without touching the caller's default.
                model = self._class._from_config(copy.deepcopy(config), dtype=torch.float32)
        except Exception as error:  # model code raises what it likes on a config that does not fit it
            what = f"transformers cannot build architecture {self.architecture}: {type(error).__name__}: {error}"
            raise CompileError(what[: limits.TEXT_ERROR], where=self.where, hint="correct config.json") from error
        shapes = dict(model.named_parameters(remove_duplicate=False))
        for name in self._own:
            if name in shapes:  # a model of the first layers lacks those of the others
                owner, _, leaf = name.rpartition(".")
                own = nn.Parameter(torch.empty_like(shapes[name]), requires_grad=False)
                model.get_submodule(owner).register_parameter(leaf, own)
        return model


def _decoder_config(config: Any) -> Any:
    """The part of a config that describes the decoder: of a model that sees pictures too, its language model."""
    return config.get_text_config(decoder=True)


def _per_layer(config: Any) -> dict[str, list[Any]]:
    """The options that have one value per layer."""
    count = getattr(config, "num_hidden_layers", None)
    return {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == count}


@contextmanager
def _parameters_on_meta() -> Generator[None]:
    """Modules made here have parameters without values; buffers (rotary frequencies, masks) are computed as always."""

    def on_meta(_module: nn.Module, _name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        if value is None or value.is_meta:
            return None
        return nn.Parameter(value.to("meta"), requires_grad=False)

    # torch annotates the hook as one without a result, and documents that a result takes the parameter's place.
    handle = register_module_parameter_registration_hook(on_meta)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        handle.remove()
