"""`TransformersTokenizer`: a `Tokenizer` and a chat template under the names and defaults of transformers.

`LLM.get_tokenizer` returns it, for scripts that were written for vLLM, whose tokenizer is transformers' own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from octavo_engine.text.template import ChatTemplate
from octavo_engine.text.tokenizer import Tokenizer


class TransformersTokenizer:
    """`find_template`: returns the template of its argument, or the model's for None; raises InvalidRequest."""

    def __init__(self, tokenizer: Tokenizer, find_template: Callable[[str | None], ChatTemplate]) -> None:
        self._tokenizer = tokenizer
        self._find_template = find_template
        self._vocab: dict[str, int] | None = None

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Encode one text or several; return lists of `input_ids` and `attention_mask`, without padding."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        each = self._tokenizer.encode_each(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": each, "attention_mask": [[1] * len(ids) for ids in each]}

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._tokenizer.piece(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._tokenizer.piece(self.eos_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self._tokenizer.piece(token_id) for token_id in self.all_special_ids]

    @property
    def chat_template(self) -> str:
        return self._find_template(None).source

    def get_vocab(self) -> dict[str, int]:
        """Return each token as the vocabulary spells it, with its id."""
        if self._vocab is None:
            pieces = ((self._tokenizer.piece(i), i) for i in range(self._tokenizer.vocab_size))
            self._vocab = {piece: i for piece, i in pieces if piece}
        return dict(self._vocab)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str]:
        if isinstance(ids, int):
            return self._tokenizer.piece(ids)
        return [self._tokenizer.piece(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """Render a conversation as token ids, or as text. Raises InvalidRequest if the template rejects it."""
        text = self._find_template(chat_template).render(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
