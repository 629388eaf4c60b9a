"""Stop strings by example; the law is in tests/property/test_text_stop_strings_law.py."""

import pytest
from octavo_engine.text.stop_strings import StopSearch, StopStrings


def _run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    search = StopSearch(StopStrings(stops), include=include)
    return [*(search.push(piece) for piece in pieces), search.flush()], search.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["END"], ["a", "E", "N", "D", "b"], ["a", "", "", "", "", ""], "END"),
        (["END"], ["aEN", "Eb"], ["a", "ENEb", ""], None),
        (["END"], ["aEN"], ["a", "EN"], None),
        (["abab"], ["aba", "bab"], ["", "", ""], "abab"),
        (["aab"], ["aa", "ab"], ["", "a", ""], "aab"),
        (["long stop", "x"], ["ax long stop"], ["a", ""], "x"),
        (["abcd", "bc"], ["abcd"], ["a", ""], "bc"),  # complete first
        (["cd", "abcd"], ["abcd"], ["", ""], "abcd"),  # ends at the same character, but is longer
        (["\n\n"], ["a\n", "b\n", "\n", "c"], ["a", "\nb", "", "", ""], "\n\n"),
        (["🤗"], ["a", "🤗", "b"], ["a", "", "", ""], "🤗"),
        ([], ["END"], ["END", ""], None),
        (["x", "x"], ["axb"], ["a", ""], "x"),
    ],
)
def test_text_ends_at_the_first_stop_string(
    stops: list[str], pieces: list[str], shown: list[str], matched: str | None
) -> None:
    assert _run(stops, pieces) == (shown, matched)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["END"], ["aE", "N", "Db"], ["aE", "N", "D", ""], "END"),
        (["END"], ["aE", "x"], ["aE", "x", ""], None),
        (["END"], ["aENDb"], ["aEND", ""], "END"),
        (["END"], ["aEN"], ["aEN", ""], None),
    ],
)
def test_no_text_is_held_back_if_the_stop_string_is_included(
    stops: list[str], pieces: list[str], shown: list[str], matched: str | None
) -> None:
    assert _run(stops, pieces, include=True) == (shown, matched)


def test_no_text_is_returned_after_a_match() -> None:
    search = StopSearch(StopStrings(["x"]))
    assert search.push("ax") == "a"
    assert search.push("bx") == search.flush() == ""
    assert search.matched == "x"
