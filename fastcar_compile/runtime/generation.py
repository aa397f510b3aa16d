"""A session behind Transformers' own `generate`: its samplers, criteria and streamers over a compiled decoder."""

# pyright: standard
import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.runtime.sampling import bounded, guided
from fastcar_compile.runtime.session import Session
from fastcar_compile.support.values import check_kind

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class SessionConfig(PreTrainedConfig):
    """The configuration that Transformers needs of a model that generates."""

    model_type = "fastcar_session"
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None


@dataclass(frozen=True)
class _Guidance:
    """A guidance scale, and the unconditional prompts int64 [rows, P]; None: the last token of the prompt."""

    scale: float
    negative_ids: Tensor | None


class TransformersDecoder(PreTrainedModel, GenerationMixin):
    """A session as a model of Transformers that generates: `TransformersDecoder(session).generate(input_ids, …)`.

    Greedy search and sampling work as with any model: temperature, top_k, top_p, repetition_penalty, stopping criteria,
    logits processors, streamers, `num_return_sequences`, `return_dict_in_generate`. Seeds are Transformers' own
    (`transformers.set_seed`). The rows of a call are the artifact's batch_size.

    With `guidance_scale` the session decodes pairs: rows b of the call and b + batch_size / 2 with the unconditional
    prompt `negative_prompt_ids`, which is as long as the prompt, since the rows of a session share their position. An
    artifact that was compiled with `couple_cfg` replays the rows of a pair together.

    Refused by name: padding and positions, beam search and other modes, a cache from outside, attentions and hidden
    states.

    Args:
        session: session of a decoder with tokens. It keeps the state of the last call.
        generation_config: defaults of `generate`.

    Raises:
        InputError: the decoder is headless.
    """

    config_class = SessionConfig
    main_input_name = "input_ids"
    _is_stateful = True

    def __init__(self, session: Session, generation_config: GenerationConfig | None = None) -> None:
        check_kind("session", session, Session, "a session of an artifact")
        sizes = session.config
        if sizes.takes_embeddings:
            hint = "use session.prefill() and session.step() with embeddings"
            raise InputError("a headless decoder has no tokens to generate", hint=hint)
        own = {"vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden_size, "num_hidden_layers": sizes.num_layers}
        super().__init__(SessionConfig(**own, max_position_embeddings=sizes.max_seq_len))
        self.session = session
        self.generation_config = generation_config or GenerationConfig()
        self._guidance: _Guidance | None = None

    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]  # the other arguments are keywords here
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **options: Any
    ) -> Any:
        """Return token ids int64 [rows, P + new], or a ModelOutput with `return_dict_in_generate`.

        Args:
            inputs: the prompts, int64 [rows, P].
            generation_config: default: the decoder's own.
            options: options of Transformers' `generate`.

        Raises:
            InputError: a compiled session does not have an option, or the call does not fit its rows or length.
        """
        if options.get("position_ids") is not None:
            hint = "give prompts of one length, without padding"
            raise InputError("the rows of a session share their positions", where="position_ids", hint=hint)
        mixin: Any = super()  # the mixin's annotations want attributes that no model has
        return mixin.generate(inputs, generation_config, **options)

    @property
    def device(self) -> torch.device:
        """The device of inputs and logits."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the logits."""
        return torch.float32

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def forward(self, input_ids: Tensor, first: bool = True, return_dict: bool | None = None) -> CausalLMOutput:
        """Return the logits [B, 1, V] after these tokens: the whole prompt where first, else one token per row.

        Raises:
            InputError: the number of rows is not the session's, a pair has prompts of different lengths, a logit is
                NaN, or all of a row are -inf.
        """
        rows = self._pairs(input_ids, first) if self._guidance else input_ids
        if rows.shape[0] != self.session.config.batch_size:
            given = count_text(rows.shape[0], "row")
            what = f"the call has {given}, the artifact decodes {self.session.config.batch_size}"
            hint = "num_return_sequences multiplies the rows, and guidance doubles them"
            raise InputError(what, where="input_ids", hint=hint)
        if first:
            self.session.reset()
        # Transformers gives all ids so far in every call. The session holds all of them but the last column.
        given = self.session.prefill(rows) if first else self.session.step(rows[:, -1])
        position = self.session.position - 1
        logits = bounded(given.double().numpy(), position, "logits")
        if self._guidance is not None:
            # As Transformers' UnbatchedClassifierFreeGuidanceLogitsProcessor, from both halves of the rows.
            logits = bounded(guided(logits, self._guidance.scale), position)
        return CausalLMOutput(logits=torch.from_numpy(logits).float()[:, None])

    def _pairs(self, input_ids: Tensor, first: bool) -> Tensor:
        """Return the rows of the call and, after them, the rows of their unconditional prompts."""
        assert self._guidance is not None
        if not first:
            return torch.cat([input_ids, input_ids])
        given = self._guidance.negative_ids
        # Without unconditional prompts Transformers begins them with the prompt's last token.
        negative = input_ids[:, -1:] if given is None else given.to(input_ids)
        if negative.shape[1] != input_ids.shape[1] or input_ids.shape[0] % negative.shape[0]:
            what = f"the unconditional prompts are {list(negative.shape)}, the prompts {list(input_ids.shape)}"
            hint = "give as many tokens for both: the rows of a session share their position"
            raise InputError(what, where="negative_prompt_ids", hint=hint)
        return torch.cat([input_ids, negative.repeat_interleave(input_ids.shape[0] // negative.shape[0], 0)])

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]  # a model names its own
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of `forward`.

        Raises:
            InputError: the attention mask leaves tokens out.
        """
        if attention_mask is not None and not bool((attention_mask == 1).all()):
            what = "the attention mask leaves tokens out, but the rows of a session have no padding"
            raise InputError(what, where="attention_mask", hint="give prompts of one length, without padding")
        return {"input_ids": input_ids, "first": is_first_iteration}

    def _get_logits_processor(
        self,
        generation_config: GenerationConfig,
        *args: Any,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> LogitsProcessorList:
        """Return the processors without guidance: `forward` applies it, where both rows of a pair are decoded."""
        scale = generation_config.guidance_scale
        self._guidance = None if scale in (None, 1) else _Guidance(float(scale), negative_prompt_ids)
        if negative_prompt_ids is not None and self._guidance is None:
            raise InputError("negative_prompt_ids are given without guidance", hint="give guidance_scale too")
        if negative_prompt_attention_mask is not None and not bool((negative_prompt_attention_mask == 1).all()):
            raise InputError("the unconditional prompts are padded", hint="give prompts of one length")
        # The caller's configuration stays as it is; the copy has no guidance, which `forward` applies.
        unguided = copy.copy(generation_config)
        unguided.guidance_scale = None
        mixin: Any = super()
        return mixin._get_logits_processor(unguided, *args, **kwargs)

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        if generation_mode not in _MODES:
            name = generation_mode.value.replace("_", " ")
            hint = "a session decodes one sequence per row: leave num_beams, assistants and the like out"
            raise InputError(f"{name} is not possible with a compiled session", hint=hint)
        if generation_config.output_attentions or generation_config.output_hidden_states:
            hint = "output_scores and output_logits are possible"
            raise InputError("a compiled decoder gives neither attentions nor hidden states", hint=hint)
        mixin: Any = super()
        mixin._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        mixin: Any = super()
        mixin._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        capacity, wanted = self.session.config.max_seq_len, generation_config.max_length
        # The last new token is never read, so one token more than the cache holds may be given back.
        if wanted is not None and wanted - 1 > capacity:
            given = f"{count_text(input_ids_length, 'prompt token')} and {wanted - input_ids_length} new ones"
            what = f"{given} do not fit max_seq_len {capacity}"
            raise InputError(what, hint="give fewer max_new_tokens, or compile with a larger max_seq_len")
