"""anthropic: messages, streams, parsed answers, the tool runner; token counts; models; errors."""

import anthropic
from asked import (
    ASK_FOR_SUMMARY,
    COLOUR_QUESTION,
    COLOURS,
    COLOURS_URL,
    OBEYING,
    OBEYING_URL,
    QUESTION,
    REAL_MODEL,
    REAL_URL,
    RED_PNG,
    SUMMARY,
    Call,
    City,
    Row,
    cities,
    expect,
)
from asked import get_weather as weather_of

real = anthropic.Anthropic(base_url=REAL_URL, api_key="none", max_retries=0)
obeying = anthropic.Anthropic(base_url=OBEYING_URL, api_key="none", max_retries=0)
colours = anthropic.Anthropic(base_url=COLOURS_URL, api_key="none", max_retries=0)
messages = [{"role": "user", "content": QUESTION}]


def ask(call: Call) -> None:
    client = anthropic.Anthropic(
        base_url=call.url, api_key=call.key, max_retries=0, timeout=call.timeout_s, default_headers=call.headers
    )
    answer = client.messages.create(
        model=call.model,
        messages=[{"role": "user", "content": call.prompt}],
        stream=call.stream,
        max_tokens=50,
        extra_body=call.fields,
    )
    if call.stream:
        list(answer)


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: Name of the city.
    """
    return weather_of(city)


row = Row("anthropic (Python)")
with row.shows("chat"):
    plain = real.messages.create(model=REAL_MODEL, max_tokens=50, messages=messages, extra_body={"temperature": 0})
    expect("name in the answer", "Paris" in plain.content[0].text, True)
    counted = real.messages.count_tokens(model=REAL_MODEL, messages=messages)
    prompt_tokens = plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)
    expect("counted tokens", counted.input_tokens, prompt_tokens)
    expect("models", REAL_MODEL in [model.id for model in real.models.list()], True)
    expect("request id", bool(plain._request_id), True)
with (
    row.shows("stream"),
    real.messages.stream(model=REAL_MODEL, max_tokens=50, messages=messages, extra_body={"temperature": 0}) as stream,
):
    expect("streamed text", stream.get_final_text(), plain.content[0].text)
with row.shows("structured output"):
    parsed = real.messages.parse(model=REAL_MODEL, max_tokens=100, messages=messages, output_format=City)
    expect("parsed message", type(parsed.parsed_output), City)
with row.shows("tools"):
    asked = [{"role": "user", "content": ASK_FOR_SUMMARY}]
    for is_streamed in (False, True):
        runner = obeying.beta.messages.tool_runner(
            model=OBEYING, max_tokens=200, messages=asked, tools=[get_weather], stream=is_streamed
        )
        expect(f"answer of the tool runner, stream {is_streamed}", runner.until_done().content[-1].text, SUMMARY)
    expect("calls of the tool", cities, ["Paris", "Paris"])
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED_PNG}}
shown = [{"role": "user", "content": [image, {"type": "text", "text": COLOUR_QUESTION}]}]
row.lacks(
    "images",
    "The Messages API of Octavo takes no images: the request gets a 400 that names the part.",
    lambda: colours.messages.create(model=COLOURS, max_tokens=1, messages=shown),
    anthropic.BadRequestError,
)
row.shows_errors(
    ask,
    {"overload (503)": "Anthropic's status is 529, which proxies do not know. The client sends both requests again."},
)
