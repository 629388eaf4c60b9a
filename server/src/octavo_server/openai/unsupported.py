"""Rejects known body fields that this version does not support, with a 400 that names the field.

A value that requests nothing (null, an empty list, `best_of` equal to `n`) is accepted.
"""

from collections.abc import Callable
from typing import Any

from octavo_engine.wire.errors import InvalidRequest

from octavo_server.openai.fields import LenientModel

_EMPTY: tuple[object, ...] = (None, "", [], {}, False)

#: Body fields that are rejected unless their value is empty.
_REFUSED = (
    *(
        "structural_tag",
        "suffix",
        "use_beam_search",
        "logits_processors",
        "prompt_embeds",
        "mm_processor_kwargs",
    ),
    *("audio", "web_search_options", "chat_template", "kv_transfer_params"),
    *("repetition_detection", "vllm_xargs"),
)

_REPLACED = {"functions": "tools", "function_call": "tool_choice"}


def _best_of(value: Any, request: LenientModel) -> bool:
    return bool(value == (getattr(request, "n", None) or 1))


_ALLOWED_IF: dict[str, Callable[[Any, LenientModel], bool]] = {
    "best_of": _best_of,
    "modalities": lambda value, _: value == ["text"],
    "function_call": lambda value, _: value == "none",
}


def refuse_unsupported(request: LenientModel) -> None:
    for name, value in (request.model_extra or {}).items():
        allowed = _ALLOWED_IF.get(name)
        if value in _EMPTY or (allowed is not None and allowed(value, request)):
            continue
        if name in _REPLACED:
            raise InvalidRequest(f"{name} was replaced by {_REPLACED[name]}: send {_REPLACED[name]}.", param=name)
        if name in _REFUSED or allowed is not None:
            raise InvalidRequest(f"{name} is not supported by this version; leave it out.", param=name)
