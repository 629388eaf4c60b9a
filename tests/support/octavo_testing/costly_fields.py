"""Every field of a generating request that is a list, an object or a number, with its largest value.

The values are chosen so that the text that the tests generate, "aaa…", is the worst for them.
"""

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from octavo_server.anthropic.messages import MessagesRequest
from octavo_server.api.chat_batch import BatchChatRequest
from octavo_server.config import RequestLimits
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.responses import ResponsesRequest

from octavo_testing.inline_engine import VOCAB_SIZE

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
REQUESTS = (CompletionRequest, ChatCompletionRequest, BatchChatRequest, ResponsesRequest, MessagesRequest)
LETTER = "a"
LETTER_ID = ord(LETTER)  # of the byte vocabulary
_LIMITS = RequestLimits()


def _stop_strings() -> list[str]:
    """Strings of which one is nearly complete, and the others begin at each of its letters."""
    long = LETTER * (_LIMITS.max_stop_chars - 1) + "b"
    others = _LIMITS.max_stop_strings - 1
    length = (_LIMITS.max_stop_strings_chars - len(long)) // others
    return [LETTER + chr(ord("b") + i % 20) + "c" * (length - 4) + f"{i:02}" for i in range(others)] + [long]


_bad_words_chars = _LIMITS.max_bad_words_chars // _LIMITS.max_bad_words
#: Path -> field -> value at its limit. The context and the vocabulary of the tests bound some of them further.
COSTLY: Mapping[str, Mapping[str, Any]] = {
    COMPLETION: {
        "stop": _stop_strings(),
        "stop_token_ids": list(range(1000, 1000 + _LIMITS.max_stop_token_ids)),
        "bad_words": [LETTER * (_bad_words_chars - 4) + f"{i:04}" for i in range(_LIMITS.max_bad_words)],
        "logit_bias": {str(i): 1 for i in range(2000, 1999 + _LIMITS.max_logit_bias)} | {str(LETTER_ID): 100},
        "allowed_token_ids": list(range(VOCAB_SIZE)),
        "logprobs": 20,
        "logprob_token_ids": list(range(128)),
        "n": 8,
        "top_k": VOCAB_SIZE - 1,
        "min_tokens": 200,
    },
    CHAT: {
        "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(256)],
        "top_logprobs": 20,
        "logprob_token_ids": list(range(128)),
        "stop": _stop_strings(),
        "n": 8,
    },
}
#: Field -> why its size has no effect on the cost of a token, or in which row it is tested.
CHEAP: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "it is the number of tokens"),
    **dict.fromkeys(("prompt", "messages", "input", "system"), "the context bounds it; it is read once"),
    **dict.fromkeys(("include", "metadata", "chat_template_kwargs"), "it is read once"),
    **dict.fromkeys(("priority", "seed", "stream_interval", "truncate_prompt_tokens"), "it is one number"),
    **dict.fromkeys(("guided_json", "guided_choice"), "a grammar decides the text, and has bounds of its own"),
    "mm_processor_kwargs": "it has few names, and is read once for each image",
    "thinking_token_budget": "it is one number, compared with a count",
    "prompt_logprobs": "it costs each prompt token, once",
    "stop_sequences": "it is `stop` of another dialect",
}


def sized_fields() -> set[str]:
    """The fields of all requests whose annotation has a list, an object or a number."""
    sized = re.compile(r"\b(list|dict|int)\b|Entries")
    return {name for model in REQUESTS for name, f in model.model_fields.items() if sized.search(str(f.annotation))}


def combined_bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> path and body, for each field and each pair of fields at their limits."""
    found = {}
    for path, values in COSTLY.items():
        for names in [*combinations(values, 1), *combinations(values, 2)]:
            body = {name: values[name] for name in names}
            if path == CHAT and ("top_logprobs" in body or "logprob_token_ids" in body):
                body["logprobs"] = True
            elif "logprob_token_ids" in body:
                body["logprobs"] = 20
            found[f"{path} {' x '.join(names)}"] = (path, body)
    return found
