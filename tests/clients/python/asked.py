"""Servers, scripts for the model that obeys, faults, and the results of a check, for all checks of Python clients."""

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, Field

OBEYING_URL, FAULTY_URL, REAL_URL, REAL_MODEL = (
    os.environ[name] for name in ("OBEYING_URL", "FAULTY_URL", "REAL_URL", "REAL_MODEL")
)
EMBEDDER_URL, COLOURS_URL, VENDOR_URL = (os.environ[name] for name in ("EMBEDDER_URL", "COLOURS_URL", "VENDOR_URL"))
OBEYING, EMBEDDER, COLOURS = "obeying", "embedder", "colours"
QUESTION = "What is the capital of France?"
COLOUR_QUESTION = "Which colour?"
RED_PNG = base64.b64encode(Path(os.environ["RED_PNG"]).read_bytes()).decode()
TEXTS = ["a cat sat on the mat", "stocks fell today", "rain in the north"]


class City(BaseModel):
    """A city and how warm it is."""

    name: Literal["Paris", "Rome"]
    celsius: int = Field(ge=-9, le=45)


WARM_PARIS = City(name="Paris", celsius=21)
WEATHER_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
WEATHER = "21 degrees"
SUMMARY = f"The tool said: {WEATHER}"
ASK_FOR_SUMMARY = f"How warm is Paris? <<1>>{WEATHER_CALL}<<2>>The tool said: %LAST%<<end>>"
ASK_FOR_CITY = f"How warm is Paris? <<1>>{WEATHER_CALL}<<2>>{WARM_PARIS.model_dump_json()}<<end>>"
cities: list[str] = []


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    cities.append(city)
    return WEATHER


class WrongAnswer(Exception):
    pass


def expect(what: str, got: Any, wanted: Any) -> None:
    if got != wanted:
        raise WrongAnswer(f"{what}: {got!r}, not {wanted!r}")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A chat request that fails. `fields`: further ones of its body. `host`: the value of its Host header, if any."""

    url: str
    model: str
    prompt: str = "Hello"
    key: str = "none"
    fields: dict[str, Any]
    host: str | None
    stream: bool
    timeout_s: float

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.host is None else {"Host": self.host}


class Row:
    """A row of docs/reference/clients.md: what one client can do by one of its ways to ask."""

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def shows(self, *columns: str, note: str = "") -> Iterator[None]:
        """Record the columns as right unless an answer is wrong. `note`: a condition under which they are."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  it is recorded
            self._record(columns, fault=f"{type(error).__name__}: {error}", note=note)
        else:
            self._record(columns, cell="yes", note=note)

    def lacks(self, column: str, note: str, ask: Callable[[], Any], error: type[Exception]) -> None:
        """Record that Octavo refuses what the client asks, with this class of error, and why."""
        raised = name_of_error(ask)
        fault = None if raised == error.__name__ else f"{raised}, not {error.__name__}"
        self._record([column], cell="no", note=note, fault=fault)

    def shows_errors(self, ask: Callable[[Call], Any], notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Record the class of each error, and that of the vendor's answer unless it is the same. `notes`: by column,
        why the two differ."""
        for fault in json.loads(os.environ["FAULTS"]):
            column, url, repeats = (fault.pop(name) for name in ("column", "url", "repeats"))
            call = Call(url=os.environ[url], **fault)
            for _ in range(repeats):
                name_of_error(lambda call=call: ask(call))
            got = name_of_error(lambda call=call: ask(call))
            vendors = Call(url=VENDOR_URL, **fault | {"model": column, "prompt": "Hello", "fields": {}, "host": None})
            wanted = name_of_error(lambda call=vendors: ask(call))
            note = notes.get(column, "")
            if (got == wanted) is bool(note):
                self._record([column], fault=f"{got}; the vendor's answer: {wanted}")
            else:
                self._record([column], cell=got if got == wanted else f"{got} (vendor: {wanted})", note=note)

    def _record(self, columns: Any, *, cell: str = "**fail**", note: str = "", fault: str | None = None) -> None:
        with Path(os.environ["RESULTS"]).open("a") as results:
            for column in columns:
                entry = {"row": self._name, "column": column, "cell": cell, "note": note, "fault": fault}
                results.write(json.dumps(entry) + "\n")


def name_of_error(ask: Callable[[], Any]) -> str:
    """Class of the error that a call raises; else what the call returns, if it is a text."""
    try:
        answer = ask()
    except (AttributeError, NameError, TypeError):  # of the check itself
        raise
    except Exception as error:  # noqa: BLE001  its class is asked for
        return type(error).__name__
    return answer if isinstance(answer, str) else "no error"
