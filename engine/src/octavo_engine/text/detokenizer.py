"""`IncrementalDetokenizer`: the text of a stream of tokens, never a broken character in the middle of one.

Law: what `push` and `flush` return, joined, is `Tokenizer.decode` of all ids, however they were split (decoded after
the prompt, where there is one). It holds because decoding is joining bytes: a character whose last bytes are still to
come waits in an incremental UTF-8 decoder, at most three bytes of it. So the cost of a token doesn't grow with the
length of the stream. U+FFFD comes out only where the model really wrote bytes that aren't UTF-8, and at `flush`, when
the stream ended within a character.
"""

import codecs
from collections.abc import Iterable

from octavo_engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """`prompt_token_ids`: what the stream continues. With visible text before it, a first token keeps its space."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special_ids: Iterable[int] = (),
        prompt_token_ids: Iterable[int] = (),
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._hidden = hidden.difference(shown_special_ids) if shown_special_ids else hidden
        self._pending = b""  # the start of a character
        self._at_start = tokenizer.strips_space and not any(
            self._token_bytes(i) for i in prompt_token_ids if i not in self._hidden
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """The new text that is final."""
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._hidden])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text, num_used = codecs.utf_8_decode(self._pending + data, "replace", False)
        self._pending = (self._pending + data)[num_used:]
        return text

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")
