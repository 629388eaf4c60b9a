"""Log-probabilities in three formats: chat content, completion columns, and vLLM's list for prompts.

Minus infinity has no JSON form and becomes -9999.0. A token that is part of a character has the text U+FFFD in the chat
format, which also has its exact bytes; in the columns, whose tokens are keys, it is written as OpenAI's API did:
`bytes:\\xf0\\x9f`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from octavo_engine.frontend.outputs import Logprob, PositionLogprobs
from octavo_engine.text.detokenizer import IncrementalDetokenizer

from octavo_server.openai.chat import ChatLogprobs, TokenLogprob, TopLogprob
from octavo_server.openai.completion import CompletionLogprobs

if TYPE_CHECKING:
    from octavo_engine.text.tokenizer import Tokenizer

FLOOR = -9999.0
MAX_KEYS = 1024  # most keys that a writer caches
ALL = -1  # as a number of top log-probabilities: the whole vocabulary


class LogprobWriter:
    """Formats log-probabilities. `as_ids`: write tokens as "token_id:123" (return_tokens_as_token_ids)."""

    def __init__(self, codec: "Tokenizer", *, num_top: int, as_ids: bool) -> None:
        self._codec = codec
        self._num_top = num_top
        self._as_ids = as_ids
        # the tokens of a list repeat from token to token
        self._key, self._spelling = lru_cache(MAX_KEYS)(self._spell_key), lru_cache(MAX_KEYS)(self._spell)

    def chat(self, positions: Iterable[PositionLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(position) for position in positions])

    def completion(
        self, positions: Iterable[PositionLogprobs], detokenizer: IncrementalDetokenizer, start: int
    ) -> CompletionLogprobs:
        """Columns of generated tokens. `detokenizer`: has the preceding tokens. `start`: offset of its text."""
        columns = CompletionLogprobs([], [], [], [])
        for position in positions:
            token_id = next(iter(position))
            self._add(columns, token_id, position, start + detokenizer.place(token_id))
            detokenizer.push([token_id])
        return columns

    def completion_prompt(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], text: str
    ) -> CompletionLogprobs:
        """Log-probabilities of a prompt. Special tokens and spaces that the tokenizer adds are not in the text."""
        columns, start = CompletionLogprobs([], [], [], []), 0
        new = partial(IncrementalDetokenizer, self._codec, skip_special_tokens=False)
        detokenizer = new()
        for token_id, position in zip(token_ids, positions, strict=True):
            place = start + detokenizer.place(token_id)
            self._add(columns, token_id, position, min(place, len(text)))
            shown = self._codec.token_str(token_id)
            is_in_text = text.startswith(shown, place)
            if self._codec.strips_space and shown.startswith(" ") and not is_in_text:
                detokenizer, start = new(), place  # strips the space
            if is_in_text or token_id not in self._codec.special_ids:
                detokenizer.push([token_id])
        return columns

    def _add(self, columns: CompletionLogprobs, token_id: int, position: PositionLogprobs | None, offset: int) -> None:
        columns.tokens.append(self._key(token_id))
        columns.text_offset.append(offset)
        columns.token_logprobs.append(None if position is None else _finite(position[token_id]))
        columns.top_logprobs.append(None if position is None else self._top(position))

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Map each token to its log-probability; a token whose text another one has, too, is written by its id."""
        top: dict[str, float] = {}
        for token_id, entry in position.items():
            key = self._key(token_id)
            top[f"token_id:{token_id}" if key in top else key] = _finite(entry)
        return top

    def _spell_key(self, token_id: int) -> str:
        text = self._token(token_id)
        if "\ufffd" not in text or text.encode() == (data := self._codec.token_bytes(token_id)):
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _chat_token(self, position: PositionLogprobs) -> TokenLogprob:
        chosen, entry = next(iter(position.items()))
        ranked = sorted(position.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
        if self._num_top != ALL:
            del ranked[self._num_top :]
        top = [TopLogprob(text, _finite(e), data) for t, e in ranked for text, data in (self._spelling(t),)]
        text, data = self._spelling(chosen)
        return TokenLogprob(text, _finite(entry), data, top)

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        return self._token(token_id), list(self._codec.token_bytes(token_id))

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._codec.token_str(token_id)


def split(columns: CompletionLogprobs, end: int) -> tuple[CompletionLogprobs, CompletionLogprobs]:
    """Split columns where the tokens begin that stand after the first `end` characters of the text."""
    num = bisect_right(columns.text_offset, end)
    parts = [
        [getattr(columns, name)[cut] for name in columns.__struct_fields__] for cut in (slice(num), slice(num, None))
    ]
    return CompletionLogprobs(*parts[0]), CompletionLogprobs(*parts[1])


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_list(positions: Sequence[PositionLogprobs | None]) -> list[dict[int, Logprob] | None]:
    """vLLM's `prompt_logprobs`: for each position a map from token id to log-probability, rank and text. It reuses the
    objects in `positions`, because there may be millions."""
    for position in positions:
        for entry in (position or {}).values():
            entry.logprob = _finite(entry)
    return list(positions)


def _finite(entry: Logprob) -> float:
    return entry.logprob if entry.logprob > FLOOR else FLOOR
