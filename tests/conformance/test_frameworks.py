"""Frameworks that people use, each on a round trip to a real model: chat, streams, tools, structured output.

What a small model says can't be relied on, the shape of it can: structured output and required tools are enforced.
"""

import importlib
import os
from typing import Literal

import pytest
from octavo_testing.target import REAL_MODEL
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

CAPITAL = "What is the capital of France? Answer with one word."
QUESTION = [{"role": "user", "content": CAPITAL}]


class City(BaseModel):
    """A city and how warm it is."""

    name: Literal["Paris", "Rome"]
    celsius: int = Field(ge=-9, le=45)


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city", "parameters": City.model_json_schema()},
}


def test_openai_client_completes_a_round_trip(real):
    plain = real.openai.chat.completions.create(model=REAL_MODEL, messages=QUESTION, temperature=0)
    assert "Paris" in plain.choices[0].message.content
    with real.openai.chat.completions.stream(model=REAL_MODEL, messages=QUESTION, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == plain.choices[0].message.content
    parsed = real.openai.chat.completions.parse(
        model=REAL_MODEL, messages=QUESTION, temperature=0, response_format=City, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    called = real.openai.chat.completions.create(
        model=REAL_MODEL, messages=QUESTION, temperature=0, max_tokens=100, tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = called.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    City.model_validate_json(call.function.arguments)


def test_litellm_completes_a_round_trip(real, monkeypatch):
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = importlib.import_module("litellm")
    asked = {
        "model": f"hosted_vllm/{REAL_MODEL}",
        "api_base": f"{real.url}/v1",
        "api_key": "none",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 100,
    }
    plain = litellm.completion(**asked)
    assert "Paris" in plain.choices[0].message.content
    assert plain.usage.total_tokens > plain.usage.prompt_tokens
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
    assert streamed == plain.choices[0].message.content
    shaped = litellm.completion(**asked, response_format=City)
    City.model_validate_json(shaped.choices[0].message.content)
    called = litellm.completion(**asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert called.choices[0].message.tool_calls[0].function.name == "weather"


def test_langchain_completes_a_round_trip(real):
    chat_openai = importlib.import_module("langchain_openai").ChatOpenAI
    chat = chat_openai(model=REAL_MODEL, base_url=f"{real.url}/v1", api_key="none", temperature=0, max_tokens=100)
    plain = chat.invoke(CAPITAL)
    assert "Paris" in plain.content
    assert plain.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(CAPITAL)) == plain.content
    called = chat.bind_tools([City], tool_choice="required", parallel_tool_calls=False).invoke(CAPITAL)
    (call,) = called.tool_calls
    assert City.model_validate(call["args"]).name in ("Paris", "Rome")
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke(CAPITAL), City)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_completes_a_round_trip(real, mode):
    instructor = importlib.import_module("instructor")
    client = instructor.from_openai(real.openai, mode=getattr(instructor.Mode, mode))
    city = client.chat.completions.create(
        model=REAL_MODEL, messages=QUESTION, response_model=City, temperature=0, max_tokens=100, max_retries=0
    )
    assert isinstance(city, City)
