"""`KVModelCard`: all data that a router needs to compute the block hashes which this replica would store for a request.

The card is self-contained: a router has no model volume, so the card holds the tokenizer and the chat template in use,
also if they come from other files or flags. Replicas with equal fingerprints compute the same hashes of a request.
"""

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_server.openai.rendering import NO_DEFAULTS, RenderDefaults

if TYPE_CHECKING:
    from octavo_engine.frontend.async_llm import AsyncLLM

MEDIA_TYPE = "application/msgpack"
FINGERPRINT_CHARS = 32


class KVModelCard(msgspec.Struct, kw_only=True, frozen=True):
    """`tokenizer`: text of a `tokenizer.json`. `root`: hash before a prompt's first block, empty if the replica caches
    no prefixes.
    """

    models: tuple[str, ...]
    root: bytes
    block_size: int
    max_model_len: int
    tokenizer: str
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    chat_template: str | None = None
    tool_chat_template: str | None = None
    chat_template_content_format: str = "auto"
    special_tokens: dict[str, str] = {}
    chat_template_kwargs: dict[str, Any] = {}
    excludes_unused_tools: bool = False
    cache_isolation: bool = False
    fingerprint: str = ""


def model_card(
    client: "AsyncLLM",
    models: tuple[str, ...],
    *,
    cache_isolation: bool,
    defaults: RenderDefaults = NO_DEFAULTS,
) -> KVModelCard:
    ready, tokenizer, template = client.ready_info, client.frontend.tokenizer, client.frontend.chat_template
    card = KVModelCard(
        models=models,
        root=ready.hash_root if client.config.enable_prefix_caching else b"",
        block_size=ready.block_size,
        max_model_len=client.frontend.max_model_len,
        tokenizer=tokenizer.to_json(),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        chat_template=template.source if template else None,
        tool_chat_template=template.tool_source if template else None,
        chat_template_content_format=template.content_format if template else "auto",
        special_tokens=template.special_tokens if template else {},
        chat_template_kwargs=dict(defaults.kwargs),
        excludes_unused_tools=defaults.excludes_unused_tools,
        cache_isolation=cache_isolation,
    )
    fingerprint = sha256(write_card(card)).hexdigest()[:FINGERPRINT_CHARS]
    return msgspec.structs.replace(card, fingerprint=fingerprint)


def write_card(card: KVModelCard) -> bytes:
    return msgspec.msgpack.encode(card)


def read_card(data: bytes) -> KVModelCard:
    """Decode a card. Unknown fields are ignored. Raises ValueError for invalid data, RecursionError if it is nested too
    deeply."""
    return msgspec.msgpack.decode(data, type=KVModelCard)
