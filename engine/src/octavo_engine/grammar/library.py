"""The only module that knows llguidance: a vocabulary as its trie, grammars checked and compiled within limits.

The library reports errors as values; here they become GrammarError. It lets other threads run while it compiles and
while it computes masks. Why this library: docs/internals/structured-output.md.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.errors import OctavoError

SILENT = 0
INITIAL_LEXER_FUEL = 100_000
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
#: Tokens that the library allows or leaves all at once, beside its own slices, which are about JSON: a regex of prose
#: or of names then costs 15 µs a mask in place of 130 to 430, and a vocabulary 40 ms more to load.
MORE_SLICES = ("[a-z ]+", "[A-Za-z ]+", "[A-Za-z0-9_]+")


class GrammarError(OctavoError):
    """The library can't compile this grammar, in its own words."""


def limits() -> LLParserLimits:
    """The library's own bounds of work, without dumps of its state; a tenth of its fuel for a lexer, which a regex such
    as `x{10000000}` burns whole: 1 s and 80 MiB at the first mask, while everybody waits."""
    return LLParserLimits(
        verbose_errors=False, initial_lexer_fuel=INITIAL_LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES
    )


def check_grammar(grammar: str) -> None:
    """Without a vocabulary. Raises GrammarError; a warning counts, as it says that something would be ignored."""
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if messages:
        raise GrammarError(messages[0].strip())


class Vocabulary:
    """`eos_token_id` marks the end for the library only: `GrammarState` says which ids may end a sequence."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.vocab_size = vocab_size
        slices = [*LLTokenizer.general_slices(), *MORE_SLICES]
        wrapper = _Wrapper(tokenizer, vocab_size, eos_token_id)
        self._trie = LLTokenizer(wrapper, eos_token=[eos_token_id], slices=slices)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at its start, to be copied for each sequence. Raises GrammarError."""
        matcher = LLMatcher(self._trie, grammar, log_level=SILENT, limits=limits())
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        return matcher


class _Wrapper(TokenizerWrapper):
    """What the library asks of a tokenizer. Special tokens are told apart, so that no text can contain them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in {*tokenizer.special_ids, eos_token_id} if i < vocab_size)
        self._tokenizer = tokenizer
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model would spell text that the grammar forces: as it was trained, if that gives these very bytes."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            return self._greedy(data)
        is_exact = b"".join(self.tokens[i] for i in ids) == data and not set(ids).intersection(self.special_token_ids)
        return ids if is_exact else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """SentencePiece puts a space before a text; what is forced mid-way has none."""
        ids: list[int] = []
        position = 0
        while position < len(data):
            found = self._longest_at(data, position)
            if found is None:
                break
            ids.append(self._ids[found])
            position += len(found)
        return ids

    def _longest_at(self, data: bytes, position: int) -> bytes | None:
        ends: Sequence[int] = range(min(position + self._longest, len(data)), position, -1)
        return next((piece for end in ends if (piece := data[position:end]) in self._ids), None)
