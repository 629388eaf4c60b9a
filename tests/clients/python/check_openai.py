"""openai: chat and responses, whole, streamed and parsed; a tool loop by hand; errors."""

import json

import openai
from asked import (
    ASK_FOR_SUMMARY,
    OBEYING,
    OBEYING_URL,
    QUESTION,
    REAL_MODEL,
    REAL_URL,
    SUMMARY,
    City,
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

messages = [{"role": "user", "content": QUESTION}]
plain = real.chat.completions.create(model=REAL_MODEL, messages=messages, temperature=0, max_tokens=50)
with real.chat.completions.stream(model=REAL_MODEL, messages=messages, temperature=0, max_tokens=50) as stream:
    expect("streamed text", stream.get_final_completion().choices[0].message.content, plain.choices[0].message.content)
parsed = real.chat.completions.parse(model=REAL_MODEL, messages=messages, response_format=City, max_tokens=100)
expect("parsed chat", type(parsed.choices[0].message.parsed), City)
parsed = real.responses.parse(model=REAL_MODEL, input=QUESTION, text_format=City, max_output_tokens=100)
expect("parsed response", type(parsed.output_parsed), City)

tool = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
messages = [{"role": "user", "content": ASK_FOR_SUMMARY}]
answer = obeying.chat.completions.create(model=OBEYING, messages=messages, tools=[tool]).choices[0]
expect("finish reason", answer.finish_reason, "tool_calls")
call = answer.message.tool_calls[0]
result = get_weather(**json.loads(call.function.arguments))
messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
with obeying.chat.completions.stream(model=OBEYING, messages=messages, tools=[tool]) as stream:
    expect("answer after the tool", stream.get_final_completion().choices[0].message.content, SUMMARY)

tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
items = [{"role": "user", "content": ASK_FOR_SUMMARY}]
response = obeying.responses.create(model=OBEYING, input=items, tools=[tool])
items += response.output
items.append({"type": "function_call_output", "call_id": response.output[-1].call_id, "output": result})
with obeying.responses.stream(model=OBEYING, input=items, tools=[tool]) as stream:
    expect("response after the tool", stream.get_final_response().output_text, SUMMARY)

try:
    real.chat.completions.create(model=REAL_MODEL, messages=[{"role": "user", "content": "word " * 20_000}])
    expect("a prompt that is too long", "an answer", "BadRequestError")
except openai.BadRequestError as error:
    expect("error code of a prompt that is too long", error.code, "context_length_exceeded")
