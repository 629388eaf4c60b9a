"""litellm: chat by its providers for OpenAI, vLLM and Anthropic; tools, types, images, vectors, ranks; errors."""

import json
import math
import os

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

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

litellm.suppress_debug_info = True
PATHS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def settings(provider: str, model: str, url: str) -> dict[str, str]:
    return {"model": f"{provider}/{model}", "api_base": url + PATHS[provider], "api_key": "none"}


def check(provider: str) -> None:
    row = Row(f"litellm, {provider}/")
    messages = [{"role": "user", "content": QUESTION}]
    asked = {**settings(provider, REAL_MODEL, REAL_URL), "messages": messages, "temperature": 0, "max_tokens": 100}
    with row.shows("chat"):
        plain = litellm.completion(**asked)
        expect("name in the answer", "Paris" in plain.choices[0].message.content, True)
        expect("tokens are counted", plain.usage.total_tokens > plain.usage.prompt_tokens, True)
    with row.shows("stream"):
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
        expect("streamed text", streamed, plain.choices[0].message.content)
    with row.shows("structured output"):
        shaped = litellm.completion(**asked, response_format=City)
        City.model_validate_json(shaped.choices[0].message.content)
    with row.shows("tools"):
        messages = [{"role": "user", "content": ASK_FOR_SUMMARY}]
        obeying = {**settings(provider, OBEYING, OBEYING_URL), "messages": messages, "tools": [TOOL]}
        message = litellm.completion(**obeying, max_tokens=200).choices[0].message
        call = message.tool_calls[0]
        result = get_weather(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        expect(
            "answer after the tool", litellm.completion(**obeying, max_tokens=200).choices[0].message.content, SUMMARY
        )
    if provider != "anthropic":
        check_media(row, provider)
    row.shows_errors(lambda call: ask(provider, call))


def check_media(row: Row, provider: str) -> None:
    with row.shows("images"):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED_PNG}"}}
        messages = [{"role": "user", "content": [image, {"type": "text", "text": COLOUR_QUESTION}]}]
        answer = litellm.completion(
            **settings(provider, COLOURS, COLOURS_URL), messages=messages, temperature=0, max_tokens=1
        )
        expect("colour", answer.choices[0].message.content, "red")
    with row.shows("embeddings"):
        found = litellm.embedding(**settings(provider, EMBEDDER, EMBEDDER_URL), input=TEXTS)
        lengths = [round(math.hypot(*entry["embedding"]), 4) for entry in found.data]
        expect("lengths of vectors", lengths, [1.0] * len(TEXTS))
    if provider == "hosted_vllm":
        with row.shows("rerank"):
            ranked = litellm.rerank(**settings(provider, EMBEDDER, EMBEDDER_URL), query=TEXTS[1], documents=TEXTS)
            expect("nearest document", ranked.results[0]["index"], 1)


def ask(provider: str, call: Call) -> None:
    answer = litellm.completion(
        model=f"{provider}/{call.model}",
        api_base=call.url + PATHS[provider],
        api_key=call.key,
        messages=[{"role": "user", "content": call.prompt}],
        max_tokens=50,
        stream=call.stream,
        timeout=call.timeout_s,
        max_retries=0,
        extra_headers=call.headers,
        **call.fields,
    )
    if call.stream:
        list(answer)


for provider in PATHS:
    check(provider)
row = Row("litellm, cohere/")
with row.shows("rerank"):
    url = f"{EMBEDDER_URL}/v2/rerank"
    ranked = litellm.rerank(
        model=f"cohere/{EMBEDDER}", api_base=url, api_key="none", query=TEXTS[1], documents=TEXTS, top_n=2
    )
    expect("nearest document", ranked.results[0]["index"], 1)
    expect("number of documents", len(ranked.results), 2)
