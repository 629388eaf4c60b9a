"""Chat templates like those of well-known models, and tokenizers that treat special tokens in every known way.

All of them use the same special tokens, so each template can be combined with each tokenizer.
"""

import json
from collections.abc import Callable
from typing import Any

from octavo_engine.text.tokenizer import Tokenizer

from octavo_testing.tiny_tokenizers import byte_level_tokenizer, sentence_piece_tokenizer

TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "[INST]", "[/INST]")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant called a b c.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|im_start|>' + message['role'] + '<|im_sep|>\n\n' + message['content'] | trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>\n\n' }}{% endif %}"
)
MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' ~ message.content ~ eos_token }}
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}
{% if loop.index0 % 2 == 1 %}{% set role = 'model' %}{% else %}{% set role = message.role %}{% endif %}
{{ '<|im_start|>' + role + '\n' + message.content | trim + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""
QWEN = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}{{ '<tool_call>' }}{{ call.function | tojson }}{% if loop.last %}!{% endif %}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>' + message.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>' }}{% endif %}{% endif %}"""
COUNTED = """{% set ns = namespace(turn=0) %}{{ messages | length }}{% for message in messages %}
{% if message.role == 'user' %}{% set ns.turn = ns.turn + 1 %}{% endif %}
<|im_start|>{{ ns.turn }} {{ message.role }} {{ message.content }}{% if loop.last %}{{ eos_token }}{% endif %}
{% endfor %}{{ reasoning_effort }}{{ documents | tojson if documents }}"""
PRINTED = (
    "{% for m in messages %}<|im_start|>{{ m | tojson }}{{ m.content | upper }}{% if 'a' in m.content %}A{% endif %}"
    "{% for key in m %}{{ key }}{% endfor %}<|im_end|>{% endfor %}{{ messages[0].content }}"
)
#: Users' and systems' messages as parts, those of the assistant as text.
PARTS = """{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '<|im_sep|>' }}
{%- if message.role == 'assistant' %}{{ message.content + '' }}
{%- else %}{% for part in message.content %}{{ part.text }}{% if not loop.last %}{{ ' + ' }}{% endif %}{% endfor %}
{%- endif %}{{ '<|im_end|>' }}{% endfor %}"""
ONE_SYSTEM = """{% if messages[0].role == 'system' %}
{{ '<|im_start|>' + messages[0].content + '<|im_end|>' }}{% endif %}
{%- for message in messages %}{% if message.role != 'system' %}
<|im_start|>{{ message.role }}
{{ message.content + '<|im_end|>' }}{% endif %}{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen": QWEN, "counted": COUNTED,
    "printed": PRINTED, "parts": PARTS, "one system": ONE_SYSTEM,
}  # fmt: skip

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _remade(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    spec = json.loads(tokenizer.to_json())
    first = 1 + max(*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"]))
    known = {token["content"] for token in spec["added_tokens"]}
    new = [token for token in TOKENS if token not in known]
    spec["added_tokens"] += [_added(first + i, token) for i, token in enumerate(new)]
    change(spec)
    return Tokenizer.from_json(json.dumps(spec), bos_token_id=tokenizer.bos_token_id, eos_token_id=1)


def _added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **off, **flags}


def _keep(spec: dict[str, Any]) -> None:
    """Leave the tokenizer unchanged."""


def _pre(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    def change(spec: dict[str, Any]) -> None:
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps]}

    return change


def _flag(name: str) -> Callable[[dict[str, Any]], None]:
    def change(spec: dict[str, Any]) -> None:
        for token in spec["added_tokens"]:
            token[name] = True

    return change


def _overlapping(spec: dict[str, Any]) -> None:
    last = max(token["id"] for token in spec["added_tokens"])
    more = ("b<|im_start", "<|im_end|>\n", "c</s", "a b", "b a b", "<|im_sep|>\n\n\n")
    spec["added_tokens"] += [_added(last + 1 + i, token) for i, token in enumerate(more)]


def _first_word_only(spec: dict[str, Any]) -> None:
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}


def _nfc(spec: dict[str, Any]) -> None:
    spec["normalizer"] = {"type": "NFC"}
    _pre(SPLIT, BYTES)(spec)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: _remade(byte_level_tokenizer(), _keep),
    "byte level, digits": lambda: _remade(byte_level_tokenizer(pre="smollm"), _keep),
    "byte level, bos": lambda: _remade(byte_level_tokenizer(pre="llama-bpe", add_bos_token=True), _keep),
    "byte level, bos and eos": lambda: _remade(byte_level_tokenizer(add_bos_token=True, add_eos_token=True), _keep),
    "byte level, composing": lambda: _remade(byte_level_tokenizer(), _nfc),
    "byte level, prefix space": lambda: _remade(
        byte_level_tokenizer(), _pre({**BYTES, "add_prefix_space": True, "use_regex": True})
    ),
    "unknown words": lambda: _remade(
        byte_level_tokenizer(), _pre({**SPLIT, "pattern": {"Regex": r"\w+\s\w+|."}}, BYTES)
    ),
    "strips right": lambda: _remade(byte_level_tokenizer(), _flag("rstrip")),
    "strips left": lambda: _remade(byte_level_tokenizer(), _flag("lstrip")),
    "single words": lambda: _remade(byte_level_tokenizer(), _flag("single_word")),
    "normalised": lambda: _remade(sentence_piece_tokenizer(), _flag("normalized")),
    "overlapping": lambda: _remade(byte_level_tokenizer(), _overlapping),
    "sentence piece": lambda: _remade(sentence_piece_tokenizer(), _keep),
    "sentence piece, no prefix": lambda: _remade(sentence_piece_tokenizer(add_space_prefix=False), _keep),
    "first word": lambda: _remade(sentence_piece_tokenizer(), _first_word_only),
}
