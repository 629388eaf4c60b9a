"""Rejects known body fields that this version does not support, with a 400 that names the field.

Fields that ask for another prompt or answer are never ignored, also if only another dialect defines them. A value that
requests nothing (null, an empty list, `best_of` equal to `n`) is accepted.
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
        "multi_modal_data",
    ),
    *("audio", "web_search_options", "chat_template", "kv_transfer_params"),
    *("repetition_detection", "vllm_xargs", "moderation"),
)
#: Fields that change the prompt or the answer and that only some of the APIs have; the other APIs reject them.
_OF_OTHER_DIALECTS = (
    *("messages", "prompt", "input", "system", "instructions", "previous_response_id", "thread", "echo"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "add_special_tokens"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "truncate_prompt_tokens", "n"),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning", "reasoning_effort", "thinking_token_budget"),
    *("response_format", "output_config", "text", "structured_outputs", "guided_choice", "guided_grammar"),
    *("guided_json", "guided_json_object", "guided_regex", "stop", "stop_sequences", "stop_token_ids", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "min_p", "seed", "logit_bias"),
    *("allowed_token_ids", "bad_words", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("return_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
)

_REPLACED = {"functions": "tools", "function_call": "tool_choice"}


def _best_of(value: Any, request: LenientModel) -> bool:
    return bool(value == (getattr(request, "n", None) or 1))


_ALLOWED_IF: dict[str, Callable[[Any, LenientModel], bool]] = {
    "best_of": _best_of,
    "modalities": lambda value, _: value == ["text"],
    "function_call": lambda value, _: value == "none",
    **{name: lambda value, _: value == 1 for name in ("n", "repetition_penalty", "length_penalty")},
    **{name: lambda value, _: value is True for name in ("parallel_tool_calls", "skip_special_tokens")},
}


def refuse_unsupported(request: LenientModel) -> None:
    for name, value in (request.model_extra or {}).items():
        allowed = _ALLOWED_IF.get(name)
        if value in _EMPTY or (allowed is not None and allowed(value, request)):
            continue
        if name in _REPLACED:
            raise InvalidRequest(f"{name} was replaced by {_REPLACED[name]}: send {_REPLACED[name]}.", param=name)
        if allowed is not None or name in _REFUSED or name in _OF_OTHER_DIALECTS:
            raise InvalidRequest(f"{name} is not supported here; leave it out.", param=name)
