"""Command lines that a parser refuses."""

from collections.abc import Callable

import pytest


def usage_error(capsys: pytest.CaptureFixture[str], parse: Callable[..., object], *arguments: object) -> str:
    """Return what a parser writes before it ends the process as for a wrong command line."""
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err
