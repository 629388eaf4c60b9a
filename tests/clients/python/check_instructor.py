"""instructor: an answer of a given type, by tools, by JSON Schema, and by Anthropic's tools; in parts; errors."""

import anthropic
import instructor
import openai
from asked import QUESTION, REAL_MODEL, REAL_URL, WARM_PARIS, Call, City, Row, expect
from instructor.core import InstructorRetryException

messages = [{"role": "user", "content": QUESTION}]
question = {
    "model": REAL_MODEL,
    "messages": messages,
    "response_model": City,
    "max_tokens": 100,
    "max_retries": 0,
    "extra_body": {"temperature": 0},
}


def from_openai(mode: instructor.Mode, url: str = REAL_URL, **settings: object) -> instructor.Instructor:
    defaults = {"api_key": "none", "max_retries": 0}
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", **(defaults | settings)), mode=mode)


def from_anthropic(url: str = REAL_URL, **settings: object) -> instructor.Instructor:
    defaults = {"api_key": "none", "max_retries": 0}
    client = anthropic.Anthropic(base_url=url, **(defaults | settings))
    return instructor.from_anthropic(client, mode=instructor.Mode.ANTHROPIC_TOOLS)


def settings_of(call: Call) -> dict[str, object]:
    return {"api_key": call.key, "timeout": call.timeout_s, "default_headers": call.headers}


def ask(client: instructor.Instructor, call: Call) -> str | None:
    """Return the error that instructor wraps: its own class is the same for all.

    The stream that fails begins with JSON, as instructor takes other text for the fault.
    """
    create = client.create_partial if call.stream else client.create
    prompt = call.prompt.replace("a long answer", WARM_PARIS.model_dump_json())
    messages = [{"role": "user", "content": prompt}]
    try:
        answer = create(**question | {"model": call.model, "messages": messages, "extra_body": call.fields})
        if call.stream:
            list(answer)
    except InstructorRetryException as error:
        return f"InstructorRetryException from {type(error.__cause__).__name__}"


row = Row("instructor, from_openai")
with row.shows("structured output"):
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        city = from_openai(mode).create(**question)
        expect(f"answer in mode {mode.name}", type(city).__name__, "City")
with row.shows("stream"):
    parts = list(from_openai(instructor.Mode.JSON_SCHEMA).create_partial(**question))
    expect("name in the last part", parts[-1].name in ("Paris", "Rome"), True)
row.shows_errors(lambda call: ask(from_openai(instructor.Mode.JSON_SCHEMA, call.url, **settings_of(call)), call))

row = Row("instructor, from_anthropic")
with row.shows("structured output"):
    city = from_anthropic().create(**question)
    expect("answer by Anthropic's tools", type(city).__name__, "City")
row.shows_errors(
    lambda call: ask(from_anthropic(call.url, **settings_of(call)), call),
    {"overload (503)": "Anthropic's status is 529, which proxies do not know. The client sends both requests again."},
)
