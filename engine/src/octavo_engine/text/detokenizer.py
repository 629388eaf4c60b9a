"""`IncrementalDetokenizer`: decodes a stream of tokens without returning incomplete characters.

Law: the joined results of `push` and `flush` equal `Tokenizer.decode` of all ids, however they were split (decoded
after the prompt, if there is one). It holds because decoding joins bytes: the first bytes of an incomplete character,
at most three, are kept until its other bytes arrive. So the cost of a token does not grow with the length of the
stream. U+FFFD is returned only for bytes of the model that are not UTF-8, and by `flush` if the stream ended within a
character.
"""

import codecs
from collections.abc import Iterable

from octavo_engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """`prompt_token_ids`: the tokens before the stream. If they have visible text, the first token keeps its space.
    `num_chars`: characters that `push` has returned."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special_ids: Iterable[int] = (),
        prompt_token_ids: Iterable[int] = (),
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        hidden = frozenset(tokenizer.special_ids if skip_special_tokens else ())
        self._hidden = hidden.difference(shown_special_ids) if shown_special_ids else hidden
        self.num_chars = 0
        self._pending = b""  # the first bytes of an incomplete character
        self._at_start = tokenizer.strips_space and not any(
            self._token_bytes(i) for i in prompt_token_ids if i not in self._hidden
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the new complete text."""
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._hidden])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text, num_used = codecs.utf_8_decode(self._pending + data, "replace", False)
        self._pending = (self._pending + data)[num_used:]
        self.num_chars += len(text)
        return text

    def place(self, token_id: int) -> int:
        """Return the position in the text at which the given token begins; if it continues a character, the position of
        that character."""
        data = b"" if token_id in self._hidden else self._token_bytes(token_id)[:1]
        text = (self._pending + data).decode("utf-8", "replace")
        return self.num_chars + max(len(text) - 1, 0)

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")
