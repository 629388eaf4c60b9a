"""`SafeSplitter` cuts a text so that its pieces, tokenised separately, have exactly the tokens of the whole text.

Three kinds of places are safe. Each is used only if the tokenizer's definition proves the property. The proof relies
only on the `tokenizers` library's order of work (added tokens first, then each stretch between them by itself):

- before an added token that is matched on the raw text, if no other added token could overlap it. The next piece
  begins with that token, so even a rule for "the first word of a text" has the same effect;
- between a small letter and a space before a letter, if the pre-tokenizer splits words by known expressions (`_SAFE`),
  none of which matches a letter followed by a space;
- before and behind each digit, if the pre-tokenizer first isolates each digit.

A cut depends only on the text before it and at most `reach` characters behind it, so texts with a common beginning are
cut alike there.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from octavo_engine.text.pre_tokenizers import PRE_TOKENIZERS

MIN_CHARS = 64
#: A stretch without special tokens is cut between words or digits after this many characters.
LONG_CHARS = 1024
_NEVER = re.compile(r"(?!)")
_WORD_GAP = re.compile(r" (?<=[a-z] )(?=[A-Za-z])")  # begins with a literal, which is found fast
_DIGIT = re.compile(r"([0-9])")
_GAP_OR_DIGIT = re.compile(rf"{_WORD_GAP.pattern}|(?=[0-9])")


def _top_level(pattern: str) -> list[str]:
    """Split an expression into its alternatives outside of brackets."""
    parts, depth, in_class = [""], 0, False
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if token == "|" and depth == 0 and not in_class:
            parts.append("")
            continue
        in_class = token == "[" or (in_class and token != "]")
        depth += 0 if in_class else (token == "(") - (token == ")")
        parts[-1] += token
    return parts


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?"
#: Alternatives of patterns that never match a letter followed by a space: those in `PRE_TOKENIZERS`, and other
#: spellings of some of them in `tokenizer.json` files.
_SAFE = frozenset(
    alternative for kind in PRE_TOKENIZERS.values() for pattern in kind.patterns for alternative in _top_level(pattern)
) | {
    _CONTRACTIONS,
    rf"{_MARKED_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
    rf"{_MARKED_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
    r"\s+",
}


@dataclass(frozen=True, slots=True)
class SafeSplitter:
    """`reach`: number of characters behind a cut on which the cut may depend."""

    special: re.Pattern[str] = _NEVER
    cuts_words: bool = False
    cuts_digits: bool = False
    reach: int = 2

    @classmethod
    def from_tokenizer(cls, tokenizer_json: str, near: str) -> "SafeSplitter":
        """`near`: a text that contains the special tokens to cut at, such as a chat template's source."""
        spec = json.loads(tokenizer_json)
        added = spec.get("added_tokens") or []
        if any(token["single_word"] for token in added):
            return cls()
        clean = [token["content"] for token in added if token["content"] in near and _is_clean(token, added)]
        special = re.compile("|".join(map(re.escape, sorted(clean)))) if clean else _NEVER
        cuts_words = _splits_words(spec) and not any(map(_spans_word_gap, added))
        has_digits = any(char.isdigit() for token in added for char in token["content"])
        reach = max([2, *map(len, clean)])
        return cls(special, cuts_words, cuts_words and not has_digits and _splits_digits(spec), reach)

    def split(self, text: str) -> list[str]:
        """Cut before special tokens, at least `MIN_CHARS` characters apart, and between words and digits of long
        stretches.
        """
        pieces: list[str] = []
        start = 0
        for match in self.special.finditer(text):
            at = match.start()
            if at - start >= MIN_CHARS:
                start = self._cut_stretch(text, start, at, pieces)
        self._cut_stretch(text, start, len(text), pieces)
        return pieces

    def parts(self, text: str) -> list[str]:
        """Cut the text at every safe place, however short the parts are."""
        starts = [match.start() for match in self.special.finditer(text)]
        stretches = [text[start:end] for start, end in pairwise((0, *starts, len(text))) if start < end]
        if self.cuts_digits:
            stretches = [run for stretch in stretches for run in _DIGIT.split(stretch) if run]
        if not self.cuts_words:
            return stretches
        return [word for stretch in stretches for word in (_words(stretch) if " " in stretch else (stretch,))]

    def _cut_stretch(self, text: str, start: int, end: int, pieces: list[str]) -> int:
        place = _GAP_OR_DIGIT if self.cuts_digits else _WORD_GAP
        while self.cuts_words and end - start > LONG_CHARS:
            gap = place.search(text, start + LONG_CHARS, end)
            if gap is None:
                break
            pieces.append(text[start : gap.start()])
            start = gap.start()
        pieces.append(text[start:end])
        return end


def _words(text: str) -> list[str]:
    words = _WORD_GAP.split(text)
    words[1:] = [" " + word for word in words[1:]]
    return words


def _is_clean(token: dict[str, Any], added: Iterable[dict[str, Any]]) -> bool:
    """True if the tokenizer matches the token at every place where its text occurs."""
    text: str = token["content"]
    if token["normalized"] or token["lstrip"] or not text or text[0].isspace():
        return False
    return not any(_may_cover(other["content"], text) for other in added if not other["normalized"])


def _may_cover(other: str, text: str) -> bool:
    """True if `other` can match from before `text` into it, or match longer text from the same place."""
    if other.startswith(text):
        return len(other) > len(text)
    return any(other.startswith(text[: len(other) - k], k) for k in range(1, len(other)))


def _spans_word_gap(token: dict[str, Any]) -> bool:
    text: str = token["content"]
    return _WORD_GAP.search(text) is not None or (token["rstrip"] and text[-1:].isalpha())


def _splits_words(spec: dict[str, Any]) -> bool:
    normalizer, model = spec.get("normalizer"), spec["model"]
    if (normalizer is not None and normalizer["type"] != "NFC") or model["type"] != "BPE" or model.get("dropout"):
        return False
    steps = _steps(spec.get("pre_tokenizer"))
    alternatives = [alternative for step in steps for alternative in _alternatives(step)]
    return any("\\s" in alternative for alternative in alternatives) and _SAFE.issuperset(alternatives)


def _splits_digits(spec: dict[str, Any]) -> bool:
    if spec.get("normalizer") is not None:
        return False
    match _steps(spec.get("pre_tokenizer"))[:1]:
        case [{"type": "Digits", "individual_digits": True}]:
            return True
        case [{"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": r"\p{N}"}}]:
            return True
    return False


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: list[dict[str, Any]] = (
        pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    )
    return steps


def _alternatives(step: dict[str, Any]) -> list[str]:
    """Alternatives of a pre-tokenizer step's pattern; `unknown`, which is not in `_SAFE`, for an unknown step."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return _top_level(PRE_TOKENIZERS["gpt-2"].patterns[0]) if use_regex else []
        case {"type": "Digits"}:
            return []
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": pattern}}:
            return _top_level(pattern)
        case _:
            return ["unknown"]
