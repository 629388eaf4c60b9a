"""Servers, scripts for the model that obeys, and `expect`, for all checks of Python clients."""

import os
import sys
from typing import Any, Literal

from pydantic import BaseModel, Field

OBEYING_URL, REAL_URL, REAL_MODEL = (os.environ[name] for name in ("OBEYING_URL", "REAL_URL", "REAL_MODEL"))
OBEYING = "obeying"
QUESTION = "What is the capital of France?"


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


def expect(what: str, got: Any, wanted: Any) -> None:
    """End the check with its first wrong answer."""
    if got != wanted:
        sys.exit(f"wrong: {what}: {got!r}, not {wanted!r}")
