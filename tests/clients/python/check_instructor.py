"""instructor: an answer of a given type, by tools, by JSON Schema, and by Anthropic's tools; in parts."""

import anthropic
import instructor
import openai
from asked import QUESTION, REAL_MODEL, REAL_URL, City, Row, expect

messages = [{"role": "user", "content": QUESTION}]
row = Row("instructor, from_openai")
with row.shows("structured output"):
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{REAL_URL}/v1", api_key="none"), mode=mode)
        city = client.chat.completions.create(
            model=REAL_MODEL, messages=messages, response_model=City, max_tokens=100, max_retries=0
        )
        expect(f"answer in mode {mode.name}", type(city).__name__, "City")
with row.shows("stream"):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{REAL_URL}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(
        client.chat.completions.create_partial(
            model=REAL_MODEL, messages=messages, response_model=City, max_tokens=100, max_retries=0
        )
    )
    expect("name in the last part", parts[-1].name in ("Paris", "Rome"), True)

row = Row("instructor, from_anthropic")
with row.shows("structured output"):
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=REAL_URL, api_key="none"), mode=instructor.Mode.ANTHROPIC_TOOLS
    )
    city = client.messages.create(
        model=REAL_MODEL, messages=messages, response_model=City, max_tokens=100, max_retries=0
    )
    expect("answer by Anthropic's tools", type(city).__name__, "City")
