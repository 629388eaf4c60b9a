"""`PromptReader`: a request's body to the blocks of its prompt, by what a replica's `ModelCard` says.

Rendering, normalising and tokenising is the replicas' own code, so the hashes are those that a replica stores. What
can't be read here (the replica will say what is wrong with it) becomes an estimate: never an error, never a guess that
calls itself exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo_engine.text.template import ChatTemplate
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.errors import OctavoError
from octavo_engine.wire.hashing import SHORT_BYTES, block_hashes, scoped_root, tenant_salt
from pydantic import ValidationError

from octavo_server.kv.card import ModelCard
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.rendering import render_messages
from octavo_server.openai.responses import ResponsesRequest
from octavo_server.router.prompt import Prompt
from octavo_server.router.prompt_estimate import Kind, affinity_of, estimate, num_chars, num_outputs, output_limit


class PromptReader:
    """`read` may be called from several threads."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.card = card
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def from_card(cls, card: ModelCard) -> "PromptReader":
        """Raises OctavoError for a tokenizer or a template that can't be used."""
        tokenizer = Tokenizer.from_json(card.tokenizer, bos_token_id=card.bos_token_id, eos_token_id=card.eos_token_id)
        template = None if card.chat_template is None else ChatTemplate(card.chat_template, card.special_tokens)
        return cls(card, tokenizer, template)

    def read(self, kind: Kind, body: Mapping[str, Any], tenant: str) -> Prompt:
        try:
            prompts = self._prompts(kind, body)
        except (OctavoError, ValidationError):
            return estimate(kind, body)
        salt = tenant_salt(tenant if self.card.cache_isolation else "", body.get("cache_salt") or "")
        root = scoped_root(self.card.root, self.card.adapters.get(body.get("model") or "", ""), salt)
        longest = max(prompts, key=len)
        return Prompt(
            num_tokens=sum(map(len, prompts)),
            affinity=affinity_of(kind, body),
            hashes=self._hashes(root, longest) if _reads_cache(body) else (),
            block_size=self.card.block_size,
            root=root,
            is_exact=True,
            max_tokens=output_limit(kind, body),
            num_outputs=num_outputs(body) * len(prompts),
        )

    def cost_chars(self, kind: Kind, body: Mapping[str, Any]) -> int:
        """How much text `read` might have to tokenise: above some 20 000 it is better called in a thread."""
        return num_chars(kind, body)

    def _prompts(self, kind: Kind, body: Mapping[str, Any]) -> list[list[int]]:
        """Raises OctavoError or ValidationError."""
        if kind == "completion":
            return self._completion(CompletionRequest.model_validate(body))
        if kind == "chat":
            return [self._chat(ChatCompletionRequest.model_validate(body))]
        return [self._chat(ResponsesRequest.model_validate(body).as_chat())]

    def _completion(self, body: CompletionRequest) -> list[list[int]]:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return [
            self._tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]

    def _chat(self, body: ChatCompletionRequest) -> list[int]:
        text = render_messages(self._template, body)
        return self._tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

    def _hashes(self, root: bytes, token_ids: list[int]) -> Sequence[int]:
        if not self.card.root:
            return ()
        hashes = block_hashes(root, token_ids, self.card.block_size)
        return [int.from_bytes(block_hash[:SHORT_BYTES], "little") for block_hash in hashes]


def _reads_cache(body: Mapping[str, Any]) -> bool:
    return not body.get("skip_reading_prefix_cache") and body.get("prompt_logprobs") is None
