"""Body fields whose meaning we know and can't honour yet: a 400 that names the field, never silence.

A field with a value that asks for nothing (null, an empty list, `n` copies out of `n` for `best_of`) passes.
"""

from collections.abc import Callable
from typing import Any

from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.fields import GenerationFields

_EMPTY: tuple[object, ...] = (None, "", [], {}, False)

#: Refused when set to anything that isn't empty.
_REFUSED = (
    *(
        "structural_tag",
        "functions",
        "suffix",
        "use_beam_search",
        "logits_processors",
        "prompt_embeds",
        "mm_processor_kwargs",
    ),
    *("audio", "web_search_options", "truncate_prompt_tokens", "chat_template", "kv_transfer_params"),
    *("thinking_token_budget", "repetition_detection", "logprob_token_ids", "vllm_xargs"),
)


def _tools(_: Any, extra: GenerationFields) -> bool:
    return (extra.model_extra or {}).get("tool_choice") == "none"


def _best_of(value: Any, request: GenerationFields) -> bool:
    return bool(value == (request.n or 1))


_ALLOWED_IF: dict[str, Callable[[Any, GenerationFields], bool]] = {
    "tools": _tools,
    "tool_choice": lambda value, _: value in ("none", "auto"),
    "function_call": lambda value, _: value in ("none", "auto"),
    "best_of": _best_of,
    "modalities": lambda value, _: value == ["text"],
}


def refuse_unsupported(request: GenerationFields) -> None:
    for name, value in (request.model_extra or {}).items():
        if value in _EMPTY:
            continue
        allowed = _ALLOWED_IF.get(name)
        if name in _REFUSED or (allowed is not None and not allowed(value, request)):
            raise InvalidRequest(f"{name} is not supported by this version; leave it out.", param=name)
