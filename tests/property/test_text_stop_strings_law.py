"""Stop strings found in a stream equal those of a naive search of the whole text, however the stream is split."""

from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.text.stop_strings import StopStrings

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
    search = StopStrings(stops, include=include)
    shown = "".join(search.push(part) for part in parts) + search.flush()
    assert (shown, search.matched) == _naive("".join(parts), stops, include=include)


@given(pieces(), stop_lists)
def test_no_more_is_held_back_than_can_start_a_stop_string(parts: list[str], stops: list[str]) -> None:
    search = StopStrings(stops)
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
    search = StopStrings(stops, include=True)
    shown = [search.push(part) for part in parts]
    if search.matched is None:
        assert shown == parts
