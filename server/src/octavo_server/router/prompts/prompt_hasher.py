"""`PromptHasher` computes the block hashes of a request's prompt from the request's body and a replica's `KVModelCard`.

It renders, normalises and tokenises with the replicas' own code, so its hashes equal those that a replica stores. A
body that it can't read gets an estimate that is not marked as exact, never an error: the replica rejects the request
with the reason.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from jinja2 import nodes
from octavo_engine.text.sandbox import template_environment
from octavo_engine.text.split_points import SafeSplitter
from octavo_engine.text.template import ChatTemplate
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.errors import InvalidRequest, OctavoError
from octavo_engine.wire.hashing import scoped_root, tenant_salt
from pydantic import ValidationError

from octavo_server.anthropic.messages import MessagesRequest
from octavo_server.config import RequestLimits
from octavo_server.kv.card import KVModelCard
from octavo_server.openai.chat import ChatCompletionRequest, ChatMessage
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.limits import check_counts
from octavo_server.openai.rendering import (
    NO_DEFAULTS,
    TEMPLATE_FIELDS,
    RenderDefaults,
    RenderOptions,
    render_conversation,
    render_options,
    without_oldest,
)
from octavo_server.openai.request_parser import validate_request
from octavo_server.openai.responses import ResponsesRequest
from octavo_server.router.prompts.hash_chain import PromptHashCache
from octavo_server.router.prompts.prompt import Kind, Prompt, affinity_of, estimate, num_outputs, output_limit
from octavo_server.router.prompts.two_queue_cache import TwoQueueCache

DEFAULT_LIMITS = RequestLimits()
#: Kinds of requests that become chat requests.
_OTHER_CHATS: dict[str, type[ResponsesRequest] | type[MessagesRequest]] = {
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
MAX_BYTES = 64 * 1024 * 1024
#: Characters per token of the context length; a longer text can't fit the context, so it is not tokenised.
MAX_CHARS_PER_TOKEN = 32
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})

Blocks = tuple[Sequence[int], int]
_OPTIONS = frozenset(
    {
        *("tools", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        "add_special_tokens",
    }
).union(TEMPLATE_FIELDS)
#: Most bytes of memory for each byte of a cache key: 1 for the byte, 4 for a character of text in the cached value.
WIDEST_TEXT = 1 + 4
#: Most bytes of memory for each JSON value: an empty object takes 64 bytes, its place in a list 8.
VALUE_BYTES = 100
_to_json = msgspec.json.Encoder().encode


class PromptHasher:
    """`hash_prompt` may be called from several threads. Call it in a thread for a long text, as the tokenizer releases
    the GIL. `max_bytes`: approximate limit of the caches.
    """

    def __init__(
        self, card: KVModelCard, tokenizer: Tokenizer, template: ChatTemplate | None, *, max_bytes: int = MAX_BYTES
    ) -> None:
        self.card = card
        self._template = template
        self._max_chars = card.max_model_len * MAX_CHARS_PER_TOKEN
        self._defaults = RenderDefaults(
            kwargs=card.chat_template_kwargs, excludes_unused_tools=card.excludes_unused_tools
        )
        self._fields = ChatFields(max_bytes=max_bytes // 16, defaults=self._defaults)
        sources = () if template is None else filter(None, (template.source, template.tool_source))
        self._is_nondeterministic = any(map(is_nondeterministic, sources))
        splitter = SafeSplitter.from_tokenizer(card.tokenizer, _with_special_tokens(card, template))
        self._chains = PromptHashCache(tokenizer, splitter, block_size=card.block_size, max_bytes=max_bytes)

    @classmethod
    def from_card(cls, card: KVModelCard) -> "PromptHasher":
        """Build a hasher. Raises OctavoError if the card's tokenizer or chat template is unusable."""
        tokenizer = Tokenizer.from_json(card.tokenizer, bos_token_id=card.bos_token_id, eos_token_id=card.eos_token_id)
        template = None
        if card.chat_template is not None:
            template = ChatTemplate(
                card.chat_template,
                card.special_tokens,
                tool_source=card.tool_chat_template,
                content_format=card.chat_template_content_format,
            )
        return cls(card, tokenizer, template)

    def hash_prompt(self, kind: Kind, body: Mapping[str, Any], tenant: str, *, adapter: str = "") -> Prompt:
        """Hash a prompt. `adapter`: hash of the adapter that the request's model names."""
        root = self._root(body, tenant, adapter)
        try:
            prompts = self._prompts(kind, body, root)
        except (OctavoError, ValidationError, OverflowError):
            return estimate(kind, body)
        hashes, num_tokens = prompts[0] if len(prompts) == 1 else max(prompts, key=_num_tokens)
        if len(prompts) > 1:
            num_tokens = sum(map(_num_tokens, prompts))
        return Prompt(
            num_tokens=num_tokens,
            affinity=affinity_of(kind, body),
            hashes=hashes if self.card.root and _reads_cache(body) else (),
            block_size=self.card.block_size,
            is_exact=True,
            max_tokens=output_limit(kind, body),
            num_outputs=num_outputs(body) * len(prompts),
        )

    def _root(self, body: Mapping[str, Any], tenant: str, adapter: str) -> bytes:
        card, own_salt = self.card, body.get("cache_salt")
        salt = tenant_salt(tenant if card.cache_isolation else "", own_salt if isinstance(own_salt, str) else "")
        return scoped_root(card.root, adapter, salt)

    def _prompts(self, kind: Kind, body: Mapping[str, Any], root: bytes) -> list[Blocks]:
        """Hash each prompt. Raises OctavoError, ValidationError or OverflowError for a body that can't be hashed.

        Numbers of items are checked first, as the validation of a huge body would hold the GIL for long.
        """
        check_counts(body, DEFAULT_LIMITS)
        if kind != "responses" and body.get("truncate_prompt_tokens") is not None:
            raise InvalidRequest("Truncated prompts are not hashed.", param="truncate_prompt_tokens")
        if kind == "chat" and body.get("chat_template"):
            raise InvalidRequest("Prompts of other chat templates are not hashed.", param="chat_template")
        if kind == "completion":
            return self._completion(body, root)
        if kind != "chat":
            asked = validate_request(dict(body), _OTHER_CHATS[kind])
            chat = asked.as_chat()
            options = render_options(chat, self._defaults)
            if isinstance(asked, ResponsesRequest) and asked.truncation == "auto":
                chat = without_oldest(
                    chat,
                    lambda shorter: _num_tokens(self._chat(shorter.conversation(), options, root)),
                    self.card.max_model_len,
                )
            return [self._chat(chat.conversation(), options, root)]
        return [self._chat(body.get("messages"), self._fields.options(body), root)]

    def _chat(self, messages: object, options: RenderOptions, root: bytes) -> Blocks:
        if self._is_nondeterministic:
            raise InvalidRequest("The chat template renders a different text each time.", param="messages")
        text = render_conversation(self._template, self._fields.conversation(messages), options)
        return self._text(text, root, add_special_tokens=options.add_special_tokens)

    def _completion(self, body: Mapping[str, Any], root: bytes) -> list[Blocks]:
        fields = {name: body.get(name) for name in ("prompt", "add_special_tokens")}
        completion = CompletionRequest.model_validate(fields)
        special = True if completion.add_special_tokens is None else completion.add_special_tokens
        return [
            self._text(prompt, root, add_special_tokens=special)
            if isinstance(prompt, str)
            else self._chains.hashes_of_ids(root, prompt)
            for prompt in completion.prompts()
        ]

    def _text(self, text: str, root: bytes, *, add_special_tokens: bool) -> Blocks:
        if len(text) > self._max_chars:
            raise InvalidRequest(f"{len(text)} characters do not fit the context.", param="prompt")
        return self._chains.hashes(root, text, add_special_tokens=add_special_tokens)


def is_nondeterministic(template_source: str) -> bool:
    """True for a chat template that renders a different text each time, so that no two of its prompts are equal."""
    try:
        tree = template_environment().parse(template_source)
        return any(node.name == "random" for node in tree.find_all(nodes.Filter))
    except RecursionError as error:
        raise InvalidRequest(f"The chat template cannot be read: {error}", param="chat_template") from error


def _with_special_tokens(card: KVModelCard, template: ChatTemplate | None) -> str:
    """Return a text that contains the special tokens which occur in this model's prompts."""
    texts = [card.chat_template or "", card.tool_chat_template or "", *card.special_tokens.values()]
    with suppress(InvalidRequest):
        texts.append(render_conversation(template, [*_PROBE], RenderOptions(kwargs=card.chat_template_kwargs)))
    return "\n".join(texts)


def _num_tokens(blocks: Blocks) -> int:
    return blocks[1]


def _reads_cache(body: Mapping[str, Any]) -> bool:
    return not body.get("skip_reading_prefix_cache") and body.get("prompt_logprobs") is None


class ChatFields:
    """Reads the conversation and the rendering options from the body of a chat request. `defaults`: the replicas'.

    The schema (`openai.chat`) validates each distinct message and each distinct set of options once; the results are
    cached under their JSON.
    """

    def __init__(self, *, max_bytes: int, defaults: RenderDefaults = NO_DEFAULTS) -> None:
        self._defaults = defaults
        self._plain = RenderOptions(kwargs=defaults.kwargs)
        self._messages: TwoQueueCache[bytes, dict[str, Any]] = TwoQueueCache(max_bytes)
        self._options: TwoQueueCache[bytes, RenderOptions] = TwoQueueCache(max_bytes)

    def options(self, body: Mapping[str, Any]) -> RenderOptions:
        """Rendering options of a chat request. Raises InvalidRequest or ValidationError if they are invalid."""
        if _OPTIONS.isdisjoint(body):
            return self._plain
        given = {name: body[name] for name in _OPTIONS if name in body}
        key = _to_json(given)
        known = self._options.get(key)
        if known is None:
            known = render_options(validate_request({"messages": [], **given}, ChatCompletionRequest), self._defaults)
            self._options.put(key, known, _size(key))
        return known

    def conversation(self, messages: object) -> list[dict[str, Any]]:
        """Messages as the template gets them. Raises InvalidRequest or ValidationError if they are invalid."""
        if not isinstance(messages, list):
            raise InvalidRequest("messages must be a list.", param="messages")
        return [self._read(message) for message in messages]

    def _read(self, message: object) -> dict[str, Any]:
        key = _to_json(message)
        known = self._messages.get(key)
        if known is None:
            known = ChatMessage.model_validate(message).model_dump(exclude_none=True)
            self._messages.put(key, known, _size(key))
        return known


def _size(key: bytes) -> int:
    """Upper estimate in bytes of a JSON key and of the values that were parsed from it."""
    num_values = sum(map(key.count, (b",", b"[", b"{")))
    return WIDEST_TEXT * len(key) + VALUE_BYTES * num_values
