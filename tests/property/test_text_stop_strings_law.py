"""Stop strings found in a stream equal those of a naive search of the whole text, however the stream is split.

The work for a character does not depend on how much text is held back.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.text.stop_strings import StopSearch, StopStrings
from octavo_testing.counted_work import count_steps

ALPHABET = "abc"  # few letters make overlaps and false starts frequent
texts = st.text(ALPHABET, max_size=24)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def _naive(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Search character by character for the match that ends first and, among equal ends, is longest."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces(), stop_lists, st.booleans())
def test_every_split_equals_the_naive_search(parts: list[str], stops: list[str], include: bool) -> None:
    search = StopSearch(StopStrings(stops), include=include)
    shown = "".join(search.push(part) for part in parts) + search.flush()
    assert (shown, search.matched) == _naive("".join(parts), stops, include=include)


@given(pieces(), stop_lists)
def test_no_more_is_held_back_than_can_start_a_stop_string(parts: list[str], stops: list[str]) -> None:
    search = StopSearch(StopStrings(stops))
    shown, text = "", ""
    for part in parts:
        shown, text = shown + search.push(part), text + part
        if search.matched is not None:
            return
        held = text[len(shown) :]
        assert text == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        assert len(held) <= max((len(stop) - 1 for stop in stops), default=0)


@given(pieces(), stop_lists)
def test_no_text_is_held_back_if_stop_strings_are_included(parts: list[str], stops: list[str]) -> None:
    search = StopSearch(StopStrings(stops), include=True)
    shown = [search.push(part) for part in parts]
    if search.matched is None:
        assert shown == parts


#: Stop strings within the limits of a request, of which the text nearly completes as many as it can.
NEARLY_COMPLETE = {
    "one": ["a" * 1023 + "b"],
    "last letter differs": ["a" * 255 + chr(ord("b") + i) for i in range(20)] + ["b" * 255] * 43,
    "all lengths": ["a" * (150 + i) + "b" for i in range(64)],
    "many beginnings": ["a" + chr(ord("b") + i % 20) + "c" * 200 + f"{i:02}" for i in range(63)] + ["a" * 1023 + "b"],
    "same end": ["b" + "a" * (190 + i) for i in range(64)],
}
TEXTS = {"one letter": "a" * 6000, "broken": ("a" * 1000 + "x") * 6, "parts": ("a" * 30 + "c") * 194}
#: Python steps for each character, calls included; a search that looks at all held text takes thousands.
MOST_STEPS = 60


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("stops", NEARLY_COMPLETE.values(), ids=NEARLY_COMPLETE)
@pytest.mark.parametrize("include", [False, True])
def test_the_work_for_a_character_does_not_depend_on_the_text_held_back(
    stops: list[str], text: str, include: bool
) -> None:
    search = StopSearch(StopStrings(stops), include=include)
    with count_steps() as steps:
        for start in range(0, len(text), 3):
            search.push(text[start : start + 3])
    assert search.matched is None
    assert steps.count <= MOST_STEPS * len(text)
