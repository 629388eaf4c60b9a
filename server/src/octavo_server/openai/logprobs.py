"""Log-probabilities in three formats: chat content, completion columns, and vLLM's list for prompts.

Minus infinity has no JSON form and becomes -9999.0. A token that is part of a character has the text U+FFFD; the chat
format also has its exact bytes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from octavo_engine.outputs import Logprob, PositionLogprobs

from octavo_server.openai.chat import ChatLogprobs, TokenLogprob, TopLogprob
from octavo_server.openai.completion import CompletionLogprobs

if TYPE_CHECKING:
    from octavo_server.api.client import TextCodec

FLOOR = -9999.0
ALL = -1  # the number of top log-probabilities that stands for the whole vocabulary


class LogprobWriter:
    """Formats log-probabilities. `as_ids`: write tokens as "token_id:123" (return_tokens_as_token_ids)."""

    def __init__(self, codec: "TextCodec", *, num_top: int, as_ids: bool) -> None:
        self._codec = codec
        self._num_top = num_top
        self._as_ids = as_ids

    def chat(self, positions: Iterable[PositionLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(position) for position in positions])

    def completion(self, positions: Sequence[PositionLogprobs | None], offset: int) -> CompletionLogprobs:
        """Columns of generated tokens, without positions that are None. `offset`: text offset of the first token."""
        columns = CompletionLogprobs([], [], [], [])
        for position in positions:
            if position is not None:
                offset += self._add(columns, next(iter(position)), position, offset)
        return columns

    def completion_prompt(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        columns, offset = CompletionLogprobs([], [], [], []), 0
        for token_id, position in zip(token_ids, positions, strict=True):
            offset += self._add(columns, token_id, position, offset)
        return columns

    def _add(self, columns: CompletionLogprobs, token_id: int, position: PositionLogprobs | None, offset: int) -> int:
        columns.tokens.append(self._token(token_id))
        columns.text_offset.append(offset)
        columns.token_logprobs.append(None if position is None else _finite(position[token_id]))
        top = None if position is None else {self._token(t): _finite(entry) for t, entry in position.items()}
        columns.top_logprobs.append(top)
        return len(self._text(token_id))

    def _chat_token(self, position: PositionLogprobs) -> TokenLogprob:
        chosen, entry = next(iter(position.items()))
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        if self._num_top != ALL:
            del ranked[self._num_top :]
        top = [TopLogprob(self._token(t), _finite(e), list(self._codec.token_bytes(t))) for t, e in ranked]
        return TokenLogprob(self._token(chosen), _finite(entry), list(self._codec.token_bytes(chosen)), top)

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._codec.token_bytes(token_id).decode("utf-8", "replace")


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_list(positions: Sequence[PositionLogprobs | None], codec: "TextCodec") -> list[dict[int, Any] | None]:
    """vLLM's `prompt_logprobs`: for each position a map from token id to log-probability, rank and text."""
    return [None if p is None else {t: _described(t, e, codec) for t, e in p.items()} for p in positions]


def _described(token_id: int, entry: Logprob, codec: "TextCodec") -> dict[str, Any]:
    text = codec.token_bytes(token_id).decode("utf-8", "replace")
    return {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": text}


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)
