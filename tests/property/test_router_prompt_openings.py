"""A text's hashes are the same however much of it is said to be an opening, and whatever was read before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.wire.hashing import root_hash
from octavo_server.router.prompts.hash_chain import PromptHashCache
from octavo_server.router.prompts.split_points import SafeSplitter
from octavo_testing.chat_shapes import TOKENIZERS, TOKENS

BLOCK, ROOT = 4, root_hash("weights", "float32", 4)
WORDS = ["word ", "a", " b", "ab 7", "\n", "And ", "long" * 20, *TOKENS]


def chains_of(tokenizer):
    return PromptHashCache(
        tokenizer, SafeSplitter.of(tokenizer.to_json(), " ".join(TOKENS)), block_size=BLOCK, max_bytes=1 << 20
    )


MADE = {name: make() for name, make in TOKENIZERS.items()}
USED = {name: chains_of(tokenizer) for name, tokenizer in MADE.items()}
TEXT = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@given(name=st.sampled_from([*MADE]), opening=TEXT, rests=st.lists(TEXT, min_size=2, max_size=3), special=st.booleans())
def test_an_opening_changes_nothing(name, opening, rests, special):
    for rest in rests:
        text = opening + rest
        plain = chains_of(MADE[name]).hashes(ROOT, text, add_special_tokens=special)
        assert USED[name].hashes(ROOT, text, add_special_tokens=special, opening_chars=len(opening)) == plain


@pytest.mark.parametrize("name", MADE)
def test_a_cut_at_the_very_end_of_an_opening_is_not_everybodys(name):
    opening = "word a " * 20 + "wo"
    for rest in (TOKENS[0] + "a", "rd a b", " b a", "7"):
        plain = chains_of(MADE[name]).hashes(ROOT, opening + rest, add_special_tokens=False)
        assert USED[name].hashes(ROOT, opening + rest, add_special_tokens=False, opening_chars=len(opening)) == plain


class Watched:
    """Looks for special tokens, and knows in which texts."""

    def __init__(self, special):
        self._special = special
        self.texts = []

    def finditer(self, text):
        self.texts.append(text)
        return self._special.finditer(text)


def test_a_known_opening_is_not_followed_again():
    tokenizer = MADE["byte level"]
    cuts = SafeSplitter.of(tokenizer.to_json(), " ".join(TOKENS))
    watched = Watched(cuts.special)
    seen = SafeSplitter(watched, cuts.cuts_words, cuts.cuts_digits, cuts.reach)
    chains = PromptHashCache(tokenizer, seen, block_size=BLOCK, max_bytes=1 << 20)
    said, asks = TOKENS[0] + "said " * 200, TOKENS[0] + "says the user: "
    opening = said + asks
    for last in "abc":
        chains.hashes(ROOT, opening + last, add_special_tokens=False, opening_chars=len(opening))
    ends = [asks + last for last in "abbcc"]  # for cuts, and for known words
    assert watched.texts == [opening + "a", said, *ends]
