"""The cost limits of a grammar, by the library's own figures, so that no clock is needed."""

from octavo_engine.grammar.compiler import parser_limits


def test_a_lexer_gets_a_tenth_of_the_library_s_fuel():
    """Using the library's full fuel, `x{10000000}` takes 1 s and 80 MiB at its first mask."""
    assert parser_limits().initial_lexer_fuel == 100_000
