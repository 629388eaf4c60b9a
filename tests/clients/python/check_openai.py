"""openai: chat and responses, whole, streamed and parsed; tool loops by hand; images; vectors; errors."""

import json
import math

import openai
from asked import (
    ASK_FOR_SUMMARY,
    COLOUR_QUESTION,
    COLOURS,
    COLOURS_URL,
    EMBEDDER,
    EMBEDDER_URL,
    OBEYING,
    OBEYING_URL,
    QUESTION,
    REAL_MODEL,
    REAL_URL,
    RED_PNG,
    SUMMARY,
    TEXTS,
    Call,
    City,
    Row,
    expect,
    get_weather,
)

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
real = openai.OpenAI(base_url=f"{REAL_URL}/v1", api_key="none", max_retries=0)
obeying = openai.OpenAI(base_url=f"{OBEYING_URL}/v1", api_key="none", max_retries=0)
colours = openai.OpenAI(base_url=f"{COLOURS_URL}/v1", api_key="none", max_retries=0)
embedder = openai.OpenAI(base_url=f"{EMBEDDER_URL}/v1", api_key="none", max_retries=0)


def client_of(call: Call) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{call.url}/v1",
        api_key=call.key,
        max_retries=0,
        timeout=call.timeout_s,
        default_headers=call.headers,
    )


def ask_chat(call: Call) -> None:
    answer = client_of(call).chat.completions.create(
        model=call.model,
        messages=[{"role": "user", "content": call.prompt}],
        stream=call.stream,
        max_tokens=50,
        extra_body=call.fields,
    )
    if call.stream:
        list(answer)


def ask_responses(call: Call) -> str | None:
    answer = client_of(call).responses.create(
        model=call.model, input=call.prompt, stream=call.stream, max_output_tokens=50, extra_body=call.fields
    )
    return f"event {[event.type for event in answer][-1]}" if call.stream else None


row = Row("openai (Python), chat")
messages = [{"role": "user", "content": QUESTION}]
with row.shows("chat"):
    plain = real.chat.completions.create(model=REAL_MODEL, messages=messages, temperature=0, max_tokens=50)
    expect("name in the answer", "Paris" in plain.choices[0].message.content, True)
with (
    row.shows("stream"),
    real.chat.completions.stream(model=REAL_MODEL, messages=messages, temperature=0, max_tokens=50) as stream,
):
    expect("streamed text", stream.get_final_completion().choices[0].message.content, plain.choices[0].message.content)
with row.shows("structured output"):
    parsed = real.chat.completions.parse(model=REAL_MODEL, messages=messages, response_format=City, max_tokens=100)
    expect("parsed chat", type(parsed.choices[0].message.parsed), City)
with row.shows("tools"):
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
    messages = [{"role": "user", "content": ASK_FOR_SUMMARY}]
    answer = obeying.chat.completions.create(model=OBEYING, messages=messages, tools=[tool]).choices[0]
    expect("finish reason", answer.finish_reason, "tool_calls")
    call = answer.message.tool_calls[0]
    result = get_weather(**json.loads(call.function.arguments))
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    with obeying.chat.completions.stream(model=OBEYING, messages=messages, tools=[tool]) as stream:
        expect("answer after the tool", stream.get_final_completion().choices[0].message.content, SUMMARY)
with row.shows("images"):
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED_PNG}"}}
    content = [image, {"type": "text", "text": COLOUR_QUESTION}]
    messages = [{"role": "user", "content": content}]
    answer = colours.chat.completions.create(model=COLOURS, messages=messages, temperature=0, max_tokens=1)
    expect("colour", answer.choices[0].message.content, "red")
with row.shows("embeddings"):
    packed = embedder.embeddings.create(model=EMBEDDER, input=TEXTS)
    plain = embedder.embeddings.create(model=EMBEDDER, input=TEXTS, encoding_format="float")
    for a, b in zip(packed.data, plain.data, strict=True):
        expect("length of a vector", round(math.hypot(*b.embedding), 4), 1.0)
        expect("base64 and floats are near", math.dist(a.embedding, b.embedding) < 1e-6, True)
row.shows_errors(ask_chat)

row = Row("openai (Python), responses")
with row.shows("chat"):
    plain = real.responses.create(model=REAL_MODEL, input=QUESTION, temperature=0, max_output_tokens=50)
    expect("name in the answer", "Paris" in plain.output_text, True)
with (
    row.shows("stream"),
    real.responses.stream(model=REAL_MODEL, input=QUESTION, temperature=0, max_output_tokens=50) as stream,
):
    expect("streamed text", stream.get_final_response().output_text, plain.output_text)
with row.shows("structured output"):
    parsed = real.responses.parse(model=REAL_MODEL, input=QUESTION, text_format=City, max_output_tokens=100)
    expect("parsed response", type(parsed.output_parsed), City)
with row.shows("tools"):
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    items = [{"role": "user", "content": ASK_FOR_SUMMARY}]
    response = obeying.responses.create(model=OBEYING, input=items, tools=[tool])
    items += response.output
    items.append({"type": "function_call_output", "call_id": response.output[-1].call_id, "output": result})
    with obeying.responses.stream(model=OBEYING, input=items, tools=[tool]) as stream:
        expect("response after the tool", stream.get_final_response().output_text, SUMMARY)
image = {"type": "input_image", "image_url": f"data:image/png;base64,{RED_PNG}"}
items = [{"role": "user", "content": [image, {"type": "input_text", "text": COLOUR_QUESTION}]}]
row.lacks(
    "images",
    "The Responses API of Octavo takes no images: the request gets a 400 that names the part.",
    lambda: colours.responses.create(model=COLOURS, input=items),
    openai.BadRequestError,
)
row.shows_errors(ask_responses)
