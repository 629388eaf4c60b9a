"""The text of a prompt stands at each token's `text_offset`, but for special tokens and spaces that tokenising adds."""

from hypothesis import example, given
from hypothesis import strategies as st
from octavo_engine.frontend.outputs import Logprob
from octavo_engine.text.tokenizer import Tokenizer
from octavo_server.openai.logprobs import LogprobWriter
from octavo_testing.tiny_tokenizers import byte_level_tokenizer, sentence_piece_tokenizer

PIECES = ["a", " b", " ", "  ", "\n", "é", "ก็", "日", "🤗", "<|end|>", "</s>", "<s>"]
tokenizers = st.sampled_from([byte_level_tokenizer(), sentence_piece_tokenizer()])


@given(tokenizers, st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join))
@example(sentence_piece_tokenizer(), "a<s>  日")
def test_the_text_stands_at_each_offset(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    writer = LogprobWriter(tokenizer, num_top=0, as_ids=False)
    columns = writer.completion_prompt(ids, [None, *({i: Logprob(-1.0)} for i in ids[1:])], text)
    assert columns.text_offset == sorted(columns.text_offset)
    for i, token, offset in zip(ids, columns.tokens, columns.text_offset, strict=True):
        rest = text[offset:]
        assert (
            token.startswith("bytes:")
            or rest.startswith(token)
            or (tokenizer.strips_space and token[:1] == " " and rest.startswith(token[1:]))
            or i in tokenizer.special_ids
        )
