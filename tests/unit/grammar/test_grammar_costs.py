"""What a grammar may cost: the figures are the library's own, so that no clock is needed."""

from octavo_engine.grammar.library import limits


def test_a_lexer_gets_a_tenth_of_the_library_s_fuel():
    """With all of it, `x{10000000}` takes 1 s and 80 MiB at its first mask."""
    assert limits().initial_lexer_fuel == 100_000
