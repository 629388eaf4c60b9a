"""However a stream of ids is split, its text equals the decoding of the whole; no piece ends within a character."""

from hypothesis import example, given
from hypothesis import strategies as st
from octavo_engine.text.detokenizer import IncrementalDetokenizer
from octavo_engine.text.tokenizer import Tokenizer
from octavo_testing.tiny_tokenizers import byte_level_tokenizer, sentence_piece_tokenizer

BYTES, PIECES = byte_level_tokenizer(), sentence_piece_tokenizer()

tokenizers = st.sampled_from([BYTES, PIECES])
#: Meaningless ids (broken bytes, special tokens, ids without a token), and ids of a real text.
any_ids = st.lists(st.integers(0, PIECES.vocab_size + 2), max_size=30)
texts = st.lists(st.sampled_from(["a", "b", " ", "é", "日", "🤗", "\n", "<|end|>", "</s>", "1"]), max_size=20).map(
    "".join
)


@st.composite
def splits(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def _joined(tokenizer: Tokenizer, pieces: list[list[int]], *, skip: bool, prompt: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prompt_token_ids=prompt)
    shown = [detokenizer.push(piece) for piece in pieces]
    return "".join(shown) + detokenizer.flush()


@given(tokenizers, any_ids, st.booleans(), st.data())
def test_any_ids_in_any_split_give_the_whole_text(
    tokenizer: Tokenizer, ids: list[int], skip: bool, data: st.DataObject
) -> None:
    pieces = data.draw(splits(ids))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert _joined(tokenizer, pieces, skip=skip, prompt=[]) == expected


@given(tokenizers, texts, texts, st.booleans(), st.data())
def test_prompt_and_stream_join_to_the_whole_text(
    tokenizer: Tokenizer, prompt: str, text: str, skip: bool, data: st.DataObject
) -> None:
    """A prompt ends with a whole character, so its text and the stream's text join between characters."""
    before, after = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    pieces = data.draw(splits(after))
    whole = tokenizer.decode([*before, *after], skip_special_tokens=skip)
    first = tokenizer.decode(before, skip_special_tokens=skip)
    assert first + _joined(tokenizer, pieces, skip=skip, prompt=before) == whole


@given(tokenizers, texts)
def test_a_whole_text_never_shows_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = [detokenizer.push([i]) for i in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(shown)
    assert detokenizer.flush() == ""


@given(tokenizers, any_ids | texts.map(BYTES.encode), st.booleans())
@example(BYTES, [237, 160], False)  # ED A0, the beginning of a surrogate, which is two broken characters
def test_every_token_has_its_place_in_the_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer, places = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), []
    for token_id in ids:
        places.append(detokenizer.place(token_id))
        detokenizer.push([token_id])
    assert places == sorted(places)
    data = b""
    for token_id, place in zip(ids, places, strict=True):
        own = b"".join(tokenizer.visible_bytes([token_id], skip_special_tokens=skip))
        new = own if data or not tokenizer.strips_space else own.removeprefix(b" ")
        if new:
            assert place == len((data + new[:1]).decode(errors="replace")) - 1
        data += new
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    assert all(place <= len(text) for place in places)
