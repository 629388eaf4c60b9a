"""Builds an `EngineRequest` from a prompt and `SamplingParams`: tokenises, resolves defaults, rejects invalid requests.

`resolve` does all work that does not depend on a prompt, once for all prompts of a request. A request that `build`
returns can run: its length fits the context, its ids are in the vocabulary, and its seed is set. `LLM` and `AsyncLLM`
share this module, which imports no torch and never changes the caller's `SamplingParams`.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo_engine.frontend.output_stream import RequestAssembly
from octavo_engine.frontend.request_limits import (
    check_ids,
    check_length,
    check_logprobs,
    default_sampling_params,
    fit_to_context,
    resolve_pooling,
)
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.media.image_prompts import ImagePrompts, Picture, load_image_prompts
from octavo_engine.media.payload import GivenImage, part_image, prompt_images
from octavo_engine.settings.config import EngineConfig, most_seqs, with_ready
from octavo_engine.settings.records import ModelConfig, ReadyInfo
from octavo_engine.sources.model_config import context_length
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.pooling import load_served_model
from octavo_engine.sources.resolve import resolve_files, resolve_text_files
from octavo_engine.text.messages import take_images
from octavo_engine.text.template import ChatTemplate, load_chat_template
from octavo_engine.text.tokenizer import Tokenizer, load_tokenizer
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.hashing import salted_digest
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import EngineRequest, ImageInput
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs

Prompt = str | Sequence[int] | Mapping[str, Any]

#: Keys of vLLM's `tokenization_kwargs` that are supported, and checks of their values.
_TOKENIZE_OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    "add_special_tokens": lambda value: isinstance(value, bool),
    "truncate_prompt_tokens": lambda value: value is None or (type(value) is int and value >= -1),
    "truncation_side": lambda value: value in (None, "left", "right"),
}


@dataclass(slots=True, kw_only=True)
class TokenizedPrompt:
    """`text`: the prompt without image tokens. `adapter`: hash of the adapter's content; "" for the base model."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    adapter: str = ""
    images: tuple[ImageInput, ...] = ()

    def check_uncut(self, size: int | None) -> None:
        """Raise InvalidRequest if `truncate_prompt_tokens` is set, which would cut the tokens of images."""
        if self.images and size is not None:
            name = "truncate_prompt_tokens"
            raise InvalidRequest(f"{name}={size} would cut the tokens of images: leave it out.", param=name)


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """Sampling parameters that are valid for the model, and the grammar text of their structured output.

    All prompts of a request share `params` and its lists, so these must not be changed. `pooling`: only for embeddings.
    """

    params: SamplingParams
    grammar: str | None
    pooling: PoolingParams | None = None


@dataclass(slots=True, kw_only=True)
class Frontend:
    """Turns prompts into requests. The caller calls `set_ready` when the engine core is ready.

    `images`: None for a model that takes only text.
    """

    config: EngineConfig
    model: ModelConfig
    tokenizer: Tokenizer
    text_files: ModelFiles
    chat_template: ChatTemplate | None
    max_model_len: int
    default_sampling_params: dict[str, Any]
    images: ImagePrompts | None = None
    _seeds: random.Random = field(init=False)
    _grammars: GrammarSource = field(init=False)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.config.seed)
        bounds = SchemaBounds(max_bytes=self.config.max_schema_bytes, max_depth=self.config.max_schema_depth)
        self._grammars = GrammarSource(bounds)

    @classmethod
    def load(cls, config: EngineConfig) -> "Frontend":
        files = resolve_files(config)
        text_files = resolve_text_files(config, files)
        model, tokenizer = load_served_model(config, files), load_tokenizer(text_files)
        sees = model.vision is not None and model.pooling is None
        images = load_image_prompts(files, model.vision, tokenizer, config) if model.vision and sees else None
        return cls(
            config=config,
            model=model,
            tokenizer=tokenizer,
            text_files=text_files,
            chat_template=load_chat_template(
                text_files,
                tokenizer,
                config.chat_template,
                config.chat_template_content_format,
                images.token if images else None,
            ),
            images=images,
            max_model_len=config.max_model_len or context_length(model),
            default_sampling_params=default_sampling_params(config, model),
        )

    def set_ready(self, ready: ReadyInfo) -> None:
        """Take the limits that the engine core has chosen by its device."""
        self.config, self.max_model_len = with_ready(self.config, ready), ready.max_model_len

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        return self.text_files.tokenizer_config

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Tokenise a prompt: a text, token ids, or a dict with "prompt" or "prompt_token_ids" (and "cache_salt",
        "multi_modal_data", "mm_processor_kwargs"). Raises InvalidRequest."""
        if isinstance(prompt, str):
            return self._tokenized(prompt, prompt, (), add_special_tokens=add_special_tokens)
        if not isinstance(prompt, Mapping):
            return self._tokenized(None, _ids(prompt), ())
        pictures = self._read_images(prompt_images(prompt), prompt.get("mm_processor_kwargs"))
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is not None:
            parsed = self._tokenized(text, _ids(token_ids), pictures)
        elif isinstance(text, str):
            parsed = self._tokenized(text, text, pictures, add_special_tokens=add_special_tokens)
        else:
            raise InvalidRequest("a prompt dict needs prompt (text) or prompt_token_ids (ids).", param="prompt")
        return replace(parsed, cache_salt=prompt.get("cache_salt") or "")

    def tokenize_with(self, options: Mapping[str, Any], prompt: Prompt) -> TokenizedPrompt:
        """Tokenise and truncate a prompt. `options`: vLLM's `add_special_tokens`, `truncate_prompt_tokens` and
        `truncation_side`, as in HTTP requests. Raises InvalidRequest."""
        for name, value in options.items():
            if not _TOKENIZE_OPTIONS.get(name, lambda _: False)(value):
                raise InvalidRequest(
                    f"tokenization_kwargs: {name}={value!r} is not supported: use add_special_tokens (true or false), "
                    "truncate_prompt_tokens (at least -1) and truncation_side (left or right).",
                    param=name,
                )
        special, size = options.get("add_special_tokens", True), options.get("truncate_prompt_tokens")
        tokenized = self.tokenize(prompt, add_special_tokens=special)
        if size is None:
            return tokenized
        tokenized.check_uncut(size)
        is_text = isinstance(prompt, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None)
        tokenized.token_ids = self.tokenizer.truncate(
            tokenized.token_ids,
            size,
            side=options.get("truncation_side"),
            max_model_len=self.max_model_len,
            is_framed=special and is_text,
            for_vector=self.model.pooling is not None,
        )
        return tokenized

    def tokenize_messages(
        self,
        messages: Sequence[dict[str, Any]],
        render: Callable[[Sequence[dict[str, Any]]], str],
        *,
        add_special_tokens: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        """Tokenise a conversation with its images. `render` makes its text by a template. Raises InvalidRequest."""
        messages, parts = (messages, {}) if self.images is None else take_images(messages)
        given = {where: part_image(part, where) for where, part in parts.items()}
        pictures = self._read_images(given, mm_processor_kwargs)
        text, where = render(messages), ", ".join(parts) or "messages"
        return self._tokenized(text, text, pictures, where=where, add_special_tokens=add_special_tokens)

    def _tokenized(
        self,
        text: str | None,
        given: str | list[int],
        pictures: Sequence[Picture],
        *,
        where: str = "prompt",
        add_special_tokens: bool = True,
    ) -> TokenizedPrompt:
        """Put the tokens of images into a text, or into token ids."""
        if self.images is not None and pictures:
            given = self.images.expand(given, pictures, where)
        ids = self.tokenizer.encode(given, add_special_tokens=add_special_tokens) if isinstance(given, str) else given
        images = () if self.images is None else self.images.find(ids, pictures, where)
        return TokenizedPrompt(text=text, token_ids=ids, images=images)

    def _read_images(self, images: Mapping[str, GivenImage], kwargs: object) -> list[Picture]:
        """Read images by their place in the prompt. `kwargs`: `mm_processor_kwargs`. Raises InvalidRequest."""
        name = "mm_processor_kwargs"
        kwargs = kwargs or {}
        if not isinstance(kwargs, Mapping):
            raise InvalidRequest(f'{name} must be an object, such as {{"size": ...}}.', param=name)
        if self.images is None:
            if images or kwargs:
                where = next(iter(images), name)
                problem = f"{where} is for images; {self.config.model} accepts only text"
                raise InvalidRequest(f"{problem}: leave it out.", param=where)
            return []
        most = self.config.limit_mm_per_prompt.get("image", len(images))
        return self.images.read_all(images, kwargs, most_images=most, max_model_len=self.max_model_len)

    def build(
        self,
        prompt: TokenizedPrompt,
        resolved: ResolvedParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        arrival_s: float | None = None,
        start_by_s: float | None = None,
        clamp_max_tokens: bool = False,
    ) -> EngineRequest:
        """Build the request of one prompt. `clamp_max_tokens`: cut `max_tokens` to the context instead of raising."""
        params = self.fit(prompt.token_ids, resolved, clamp=clamp_max_tokens)
        if params.seed is None and not params.is_greedy:
            params.seed = self._seeds.getrandbits(62)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            eos_token_id=self.eos_token_id,
            arrival_s=time.monotonic() if arrival_s is None else arrival_s,
            priority=priority,
            tenant=tenant,
            weight=weight,
            start_by_s=start_by_s,
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
            grammar=resolved.grammar,
            pooling=resolved.pooling,
            images=tuple(replace(i, digest=salted_digest(i.digest, prompt.cache_salt)) for i in prompt.images),
        )

    def resolve(self, params: SamplingParams, *, priority: int = 0) -> ResolvedParams:
        """Check parameters and resolve their defaults, bad words and grammar. Raises InvalidRequest.

        This is slow with bad words, long lists or a new grammar: run it in a thread.
        """
        if self.model.pooling is not None:
            raise InvalidRequest(f"{self.config.model} is an embedding model and generates no text: use LLM.embed.")
        self._check_priority(priority)
        if params.n > most_seqs(self.config):
            raise InvalidRequest(
                f"n={params.n} outputs run side by side; the limit is {most_seqs(self.config)}: lower n or raise "
                f"--max-num-seqs.",
                param="n",
            )
        return ResolvedParams(self._resolve(params), self.grammar(params))

    def resolve_pooling(self, params: PoolingParams, *, priority: int = 0) -> ResolvedParams:
        """Check the parameters of requests for vectors; set those left out. Raises InvalidRequest."""
        if self.model.pooling is None:
            raise InvalidRequest(
                f"{self.config.model} generates text and makes no embeddings: start the engine with --runner pooling "
                '(LLM(runner="pooling")), which serves embeddings only.'
            )
        self._check_priority(priority)
        pooling = resolve_pooling(params, self.model.pooling, self.model.hidden_size)
        unused = SamplingParams(
            temperature=0.0,
            max_tokens=None,
            detokenize=False,
            skip_reading_prefix_cache=self.model.pooling.kind != "LAST",  # other poolings need the rows of all tokens
        )
        return ResolvedParams(unused, None, pooling)

    def fit(self, token_ids: list[int], resolved: ResolvedParams, *, clamp: bool = False) -> SamplingParams:
        """Check a prompt; return a shallow copy of the parameters that fits it, without a random seed.

        Raises InvalidRequest.
        """
        self._check_prompt(token_ids)
        params = resolved.params
        if resolved.pooling is not None:
            check_length(len(token_ids), self.max_model_len)
            return params
        if params.thinking_token_budget is not None and params.reasoning_end_token_id is None:
            raise InvalidRequest(
                f"thinking_token_budget={params.thinking_token_budget} needs a model whose reasoning ends with one "
                "token: set reasoning_end_token_id, or start the server with --reasoning-parser.",
                param="thinking_token_budget",
            )
        return fit_to_context(params, len(token_ids), self.max_model_len, clamp=clamp)

    def grammar(self, params: SamplingParams) -> str | None:
        """Return the grammar text of `params.structured_outputs`. The first call is slow, but releases the GIL."""
        if params.structured_outputs is None:
            return None
        if self.eos_token_id is None:
            message = "structured_outputs needs a model with an end-of-sequence token, and this model has none."
            raise InvalidRequest(message, param="structured_outputs")
        return self._grammars.grammar_for(self._with_settings(params.structured_outputs))

    def _with_settings(self, shape: StructuredOutputs) -> StructuredOutputs:
        """The shape with the configured settings; a request's own pattern of whitespace stays."""
        bans_whitespace = self.config.disable_any_whitespace and shape.whitespace_pattern is None
        return replace(
            shape,
            disable_any_whitespace=shape.disable_any_whitespace or bans_whitespace,
            disable_additional_properties=shape.disable_additional_properties
            or self.config.disable_additional_properties,
        )

    def assemble(self, request: EngineRequest, prompt: TokenizedPrompt, *, request_id: str) -> RequestAssembly:
        return RequestAssembly(request_id=request_id, prompt=prompt.text, request=request, tokenizer=self.tokenizer)

    def template(self, override: str | None, content_format: str = "auto") -> ChatTemplate:
        """Return `override` (a file or a template's text), else the model's chat template. Raises InvalidRequest.

        `content_format`: the server's if "auto".
        """
        chosen = self.chat_template
        if override is not None or content_format != "auto":
            given = self.config.chat_template if override is None else override
            form = self.config.chat_template_content_format if content_format == "auto" else content_format
            image_token = self.images.token if self.images else None
            chosen = load_chat_template(self.text_files, self.tokenizer, given, form, image_token)
        if chosen is None:
            raise InvalidRequest("The model has no chat template: pass chat_template.", param="chat_template")
        return chosen

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence id of the tokenizer, else of the model; the model's other ids become stop token ids."""
        if self.tokenizer.eos_token_id is not None:
            return self.tokenizer.eos_token_id
        return next(iter(self.model.eos_token_ids), None)

    def _check_priority(self, priority: int) -> None:
        if priority and self.config.scheduling_policy != "priority":
            raise InvalidRequest(f"priority={priority} needs --scheduling-policy priority.", param="priority")

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
        check_ids("prompt", token_ids, self.model.vocab_size)

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        vocab = self.model.vocab_size
        check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab)
        check_ids("logit_bias", params.logit_bias or (), vocab)
        check_ids("stop_token_ids", params.stop_token_ids or (), vocab)
        check_logprobs(params, self.config.max_logprobs, vocab)
        check_ids("logprob_token_ids", params.logprob_token_ids or (), vocab)
        resolved = replace(
            params,
            logprobs=vocab if params.logprobs == -1 else params.logprobs,
            prompt_logprobs=vocab if params.prompt_logprobs == -1 else params.prompt_logprobs,
        )
        resolved.update_from_generation_config({"eos_token_id": self.model.eos_token_ids}, self.eos_token_id)
        resolved.update_from_tokenizer(self.tokenizer)
        return resolved


def _ids(given: object) -> list[int]:
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return list(given)
    raise InvalidRequest(
        f"a prompt must be a text, a list of token ids or a dict with one of these, got {type(given).__name__}.",
        param="prompt",
    )
