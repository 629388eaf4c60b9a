import json
import logging
import sys

import pytest
from octavo_engine.log_format import REQUEST_ID, JsonFormatter, TextFormatter, configure_logging


@pytest.fixture
def about_request():
    token = REQUEST_ID.set("cmpl-7")
    yield
    REQUEST_ID.reset(token)


def record(message, *args, exc_info=None):
    return logging.LogRecord("octavo.x", logging.WARNING, __file__, 1, message, args, exc_info)


def failure(message="two\nlines"):
    try:
        raise ValueError(message)
    except ValueError:
        return sys.exc_info()


def test_text_has_time_level_process_and_message():
    assert TextFormatter().format(record("is %d", 3))[8:] == " WARNING is 3"
    assert TextFormatter("core").format(record("up"))[8:] == " WARNING core: up"


def test_text_names_the_request(about_request):
    assert TextFormatter().format(record("failed"))[8:] == " WARNING [cmpl-7] failed"


def test_control_characters_of_a_client_are_escaped():
    line = TextFormatter().format(record("%s", "a\nb\r\x1b[31mc\td é"))
    assert line.endswith("a\\nb\\x0d\\x1b[31mc\td é")


def test_an_id_of_a_client_is_escaped():
    token = REQUEST_ID.set("x]\n12:00:00 CRITICAL forged \x1b[31m")
    line = TextFormatter().format(record("failed"))
    REQUEST_ID.reset(token)
    assert line.endswith(" [x]\\n12:00:00 CRITICAL forged \\x1b[31m] failed")


def test_text_keeps_the_traceback_as_indented_lines():
    text = TextFormatter().format(record("failed", exc_info=failure("two\n12:00:00 CRITICAL forged\x1b[31m\rx")))
    first, *traceback = text.split("\n")
    assert first.endswith(" failed")
    assert traceback[0] == "  Traceback (most recent call last):"
    assert traceback[-2:] == ["  ValueError: two", "  12:00:00 CRITICAL forged\\x1b[31m\\x0dx"]


def test_text_keeps_the_stack_as_indented_lines():
    shown = record("failed")
    shown.stack_info = "Stack:\nforged\x1b"
    assert TextFormatter().format(shown).endswith(" failed\n  Stack:\n  forged\\x1b")


def test_json_is_one_object_per_line(about_request):
    text = JsonFormatter("api").format(record("is\n%d", 3, exc_info=failure()))
    line = json.loads(text)
    assert "\n" not in text
    assert line.pop("time").endswith("+00:00")
    assert line.pop("exception").endswith("two\nlines")
    expected = {"level": "warning", "logger": "octavo.x", "process": "api", "message": "is\n3", "request_id": "cmpl-7"}
    assert line == expected


def test_json_without_a_request_has_no_id():
    assert "request_id" not in json.loads(JsonFormatter("core").format(record("x")))


@pytest.mark.parametrize("run", ["first", "second"])
def test_a_tests_logging_configuration_ends_with_the_test(run, capsys):
    """Otherwise a later test would write to a closed stream and capture lines of an unexpected level."""
    assert logging.getLogger().level == logging.WARNING
    assert not [h for h in logging.getLogger().handlers if type(h) is logging.StreamHandler]
    configure_logging("text", process="api")
