"""A question that needs a tool: the model requests a call, this script makes it, and the model answers from the result.

Start the server first: `make serve`. With `tool_choice="required"`, as here, any model makes a call. To let the model
decide (`tool_choice="auto"`), serve a model that was trained to call tools, for example
`make serve MODEL=Qwen/Qwen3-0.6B ARGS='--enable-auto-tool-choice --tool-call-parser hermes'`.
"""

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

TEMPERATURES = {"Oslo": 4, "Lagos": 31, "Lima": 19}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "The temperature in a city now, in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(TEMPERATURES)}},
            "required": ["city"],
        },
    },
}


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    asked = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    message = asked.choices[0].message
    messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
    for call in message.tool_calls or []:
        assert call.type == "function"
        print(f"the model calls {call.function.name}({call.function.arguments})")
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{TEMPERATURES[city]} degrees"})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="none", temperature=0
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
