"""What the tensors of a checkpoint are called in the model, by Transformers' own rules for loading them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


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
        for name in names:
            path, converter = rename_source_key(name, renamings, converters, prefix, known)
            # The model has this name, and a rule would turn it into one that the model lacks: the name stays.
            if path not in known and name in known:
                path, converter = rename_source_key(name, [], [], prefix, known)
            if converter is None:
                stored[path] = name
            else:
                converted |= dict.fromkeys(_targets(path, converter, converters), name)
        return cls(stored, converted)


def _targets(path: str, pattern: str, converters: list[WeightConverter]) -> list[str]:
    """The parameters that a conversion makes; `path` is the first of them."""
    rule = next(rule for rule in converters if pattern in rule.source_patterns)
    return [path.replace(rule.target_patterns[0], target) for target in rule.target_patterns]
