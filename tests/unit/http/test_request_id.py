import pytest
from octavo_server.http.request_id import is_usable, request_id_of


@pytest.mark.parametrize("given", [b"trace-7", b"00-4bf92f35:1/2+3=", b"a" * 256])
def test_a_usable_client_id_is_used(given):
    assert request_id_of([(b"host", b"x"), (b"x-request-id", given)]) == given.decode()


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"a b",
        b"a] ERROR [b",
        b'"',
        b"'",
        b"<b>",
        b"a\tb",
        b"a\x1b[2J",
        b"\xc3\xa9",
        b"(a)",
        b"{}",
        b"\\",
        b"a" * 257,
    ],
)
def test_an_id_that_could_forge_a_log_line_is_replaced(given):
    found = request_id_of([(b"x-request-id", given)])
    assert len(found) == 32
    assert found.isalnum()


def test_a_request_without_an_id_gets_one():
    assert request_id_of([]) != request_id_of([])


@pytest.mark.parametrize(
    ("given", "usable"),
    [("trace-7", True), ("a b", False), ("x]\n12:00:00 CRITICAL [0] forged", False), ("é", False), ("\ud800", False)],
)
def test_an_id_of_a_body_passes_the_same_test(given, usable):
    assert is_usable(given) is usable
