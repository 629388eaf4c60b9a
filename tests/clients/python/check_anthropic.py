"""anthropic: messages whole, streamed and parsed; the tool runner; token counts; models; errors."""

import anthropic
from asked import ASK_FOR_SUMMARY, OBEYING, OBEYING_URL, QUESTION, REAL_MODEL, REAL_URL, SUMMARY, City, cities, expect
from asked import get_weather as weather_of

real = anthropic.Anthropic(base_url=REAL_URL, api_key="none", max_retries=0)
obeying = anthropic.Anthropic(base_url=OBEYING_URL, api_key="none", max_retries=0)
messages = [{"role": "user", "content": QUESTION}]

plain = real.messages.create(model=REAL_MODEL, max_tokens=50, messages=messages, extra_body={"temperature": 0})
with real.messages.stream(model=REAL_MODEL, max_tokens=50, messages=messages, extra_body={"temperature": 0}) as stream:
    expect("streamed text", stream.get_final_text(), plain.content[0].text)
parsed = real.messages.parse(model=REAL_MODEL, max_tokens=100, messages=messages, output_format=City)
expect("parsed message", type(parsed.parsed_output), City)
counted = real.messages.count_tokens(model=REAL_MODEL, messages=messages)
expect("counted tokens", counted.input_tokens, plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0))
expect("models", REAL_MODEL in [model.id for model in real.models.list()], True)
expect("request id", bool(plain._request_id), True)


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: Name of the city.
    """
    return weather_of(city)


asked = [{"role": "user", "content": ASK_FOR_SUMMARY}]
for stream in (False, True):
    runner = obeying.beta.messages.tool_runner(
        model=OBEYING, max_tokens=200, messages=asked, tools=[get_weather], stream=stream
    )
    expect(f"answer of the tool runner, stream {stream}", runner.until_done().content[-1].text, SUMMARY)
expect("calls of the tool", cities, ["Paris", "Paris"])

try:
    real.messages.create(model=REAL_MODEL, max_tokens=10, messages=[{"role": "user", "content": "word " * 20_000}])
    expect("a prompt that is too long", "an answer", "BadRequestError")
except anthropic.BadRequestError as error:
    expect("beginning of the error", error.body["error"]["message"][:18], "prompt is too long")
