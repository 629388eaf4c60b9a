"""`Prompt`: the properties of a request's prompt that routing uses, and `estimate`, which needs no tokenizer.

Bodies are not validated here, so any field may have any type: a field of an unexpected type is ignored, and the replica
rejects the request.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from octavo_engine.wire.sampling import INT32_MAX

from octavo_server.openai.completion import DEFAULT_MAX_TOKENS

Kind = Literal["chat", "completion", "responses", "messages"]
#: `invocation`: the body's shape decides between chat and completion.
RouteKind = Kind | Literal["invocation"]

CHARS_PER_TOKEN = 4
OPENING_CHARS = 256
#: Number of prompts' beginnings whose hashes are cached.
MAX_OPENINGS = 1024
MAX_EXPECTED = 128
#: Most outputs of a prompt that count as load: replicas refuse requests for more than they can run at once.
MAX_OUTPUTS = 1024
#: Approximate number of tokens that a template adds to each message.
TOKENS_PER_MESSAGE = 4


class Prompt(NamedTuple):  # constructed three times as fast as a frozen dataclass
    """`hashes`: short hashes of the full blocks, as replicas would store them; empty where the router couldn't compute
    them (`is_exact` is False then, and `num_tokens` an estimate) or where the request or replica uses no prefix cache.

    `affinity`: hash of the conversation's beginning, equal for all prompts that could share a prefix. Consistent
    hashing uses it when no replica is known to hold blocks.
    """

    num_tokens: int
    affinity: int
    hashes: Sequence[int] = ()
    block_size: int = 16
    is_exact: bool = False
    max_tokens: int | None = None  # output limit of the request; None if it sets none
    num_outputs: int = 1

    @property
    def expected_output_tokens(self) -> int:
        """Assumed tokens of all outputs together: few requests generate as many as they allow."""
        return self.num_outputs * (MAX_EXPECTED if self.max_tokens is None else min(self.max_tokens, MAX_EXPECTED))


def kind_of_body(kind: RouteKind, body: Mapping[str, Any]) -> Kind:
    if kind == "invocation":
        return "completion" if body.get("messages") is None else "chat"
    return kind


def estimate(kind: Kind, body: Mapping[str, Any]) -> Prompt:
    prompts = _prompts(kind, body)
    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    num_ids = sum(len(prompt) for prompt in prompts if isinstance(prompt, list))
    framing = 0 if kind == "completion" else len(prompts) * TOKENS_PER_MESSAGE
    return Prompt(
        num_tokens=max(num_chars // CHARS_PER_TOKEN + num_ids + framing, 1),
        affinity=affinity_of(kind, body),
        max_tokens=output_limit(kind, body),
        num_outputs=num_outputs(body) * (max(len(prompts), 1) if kind == "completion" else 1),
    )


def affinity_of(kind: Kind, body: Mapping[str, Any]) -> int:
    """Hash the prompt's beginning, at most to the end of the first user message, so that it is equal in each turn."""
    opening = [_short_salt(body.get("cache_salt"))]
    room = OPENING_CHARS
    for text in _opening(kind, body):
        opening.append(text[:room])
        room -= len(text)
        if room <= 0:
            break
    return _hash_opening("\n".join(opening))


def _short_salt(salt: object) -> str:
    """Hash a long cache salt: it is part of the keys of a cache that bounds the number of entries, not their size."""
    if not isinstance(salt, str):
        return ""
    return salt if len(salt) <= OPENING_CHARS else _digest(salt).hex()


@lru_cache(MAX_OPENINGS)
def _hash_opening(opening: str) -> int:
    return int.from_bytes(_digest(opening)[:8], "little")


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest()


def output_limit(kind: Kind, body: Mapping[str, Any]) -> int | None:
    names = {"chat": ("max_completion_tokens", "max_tokens"), "responses": ("max_output_tokens",)}
    for name in names.get(kind, ("max_tokens",)):
        if isinstance(limit := body.get(name), int):
            return max(0, min(limit, INT32_MAX))
    return DEFAULT_MAX_TOKENS if kind == "completion" else None


def num_outputs(body: Mapping[str, Any]) -> int:
    n = body.get("n")
    return max(1, min(n, MAX_OUTPUTS)) if isinstance(n, int) else 1


def _opening(kind: Kind, body: Mapping[str, Any]) -> list[str]:
    if kind == "completion":
        first = _prompts(kind, body)[:1]
        return [prompt if isinstance(prompt, str) else " ".join(map(str, prompt[:OPENING_CHARS])) for prompt in first]
    texts = _system(kind, body)
    for message in _messages(kind, body):
        texts.append(_content(message))
        if isinstance(message, str) or message.get("role") == "user":
            break
    return texts


def _prompts(kind: Kind, body: Mapping[str, Any]) -> list[str | list[Any]]:
    """Prompts of a completion (texts and lists of token ids), or the text of each message of a conversation."""
    if kind == "completion":
        return _split(body.get("prompt"))
    return [*_system(kind, body), *map(_content, _messages(kind, body))]


def _system(kind: Kind, body: Mapping[str, Any]) -> list[str]:
    """Text that precedes the messages of a conversation, if any."""
    text = _content({"content": body.get("system" if kind == "messages" else "instructions")})
    return [text] if text else []


def _split(prompt: Any) -> list[str | list[Any]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        return []
    if isinstance(prompt[0], int):
        return [prompt]
    return [entry for entry in prompt if isinstance(entry, str | list)]


def _messages(kind: Kind, body: Mapping[str, Any]) -> list[Any]:
    given = body.get("input" if kind == "responses" else "messages")
    if isinstance(given, str):
        return [given]
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def _content(message: Any) -> str:
    if isinstance(message, str):
        return message
    content = message.get("content")
    if isinstance(content, list):
        parts = (_part(part) if isinstance(part, dict) else part for part in content)
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _part(part: Mapping[str, Any]) -> Any:
    """The text of a part; for an image, its hash, so that equal questions about different images are spread."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return _digest(url).hex()[:16] if isinstance(url, str) else part.get("text")
