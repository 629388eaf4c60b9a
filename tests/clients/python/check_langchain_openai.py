"""langchain-openai: text, streams, tools, structured output, agents, images, vectors; errors."""

import math

from asked import (
    ASK_FOR_CITY,
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
    WARM_PARIS,
    Call,
    City,
    Row,
    expect,
    get_weather,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def ask(call: Call) -> None:
    chat = ChatOpenAI(
        model=call.model,
        base_url=f"{call.url}/v1",
        api_key=call.key,
        max_retries=0,
        timeout=call.timeout_s,
        default_headers=call.headers,
        extra_body=call.fields,
    )
    if call.stream:
        list(chat.stream(call.prompt))
    else:
        chat.invoke(call.prompt)


for responses in (False, True):
    row = Row(f"langchain-openai, {'responses' if responses else 'chat'}")
    settings = {"api_key": "none", "max_retries": 0, "use_responses_api": responses}
    chat = ChatOpenAI(model=REAL_MODEL, base_url=f"{REAL_URL}/v1", temperature=0, max_tokens=100, **settings)
    with row.shows("chat"):
        plain = chat.invoke(QUESTION)
        expect("name in the answer", "Paris" in plain.text, True)
    with row.shows("stream"):
        expect("streamed text", "".join(chunk.text for chunk in chat.stream(QUESTION)), plain.text)
    obeying = ChatOpenAI(model=OBEYING, base_url=f"{OBEYING_URL}/v1", **settings)
    with row.shows("tools"):
        tool = convert_to_openai_tool(City)
        called = chat.bind_tools([tool], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
        expect("required tool", [call["name"] for call in called.tool_calls], ["City"])
        agent = create_agent(obeying, tools=[get_weather])
        state = agent.invoke({"messages": [{"role": "user", "content": ASK_FOR_SUMMARY}]})
        expect("answer of an agent", state["messages"][-1].text, SUMMARY)
    with row.shows("structured output"):
        for method in ("json_schema", "function_calling"):
            typed = chat.with_structured_output(City, method=method).invoke(QUESTION)
            expect(f"structured output by {method}", type(typed), City)
        agent = create_agent(obeying, tools=[get_weather], response_format=ProviderStrategy(City))
        state = agent.invoke({"messages": [{"role": "user", "content": ASK_FOR_CITY}]})
        expect("typed answer of an agent", state["structured_response"], WARM_PARIS)
    if responses:
        continue
    with row.shows("images"):
        colours = ChatOpenAI(model=COLOURS, base_url=f"{COLOURS_URL}/v1", temperature=0, max_tokens=1, **settings)
        image = {"type": "image", "base64": RED_PNG, "mime_type": "image/png"}
        content = [image, {"type": "text", "text": COLOUR_QUESTION}]
        expect("colour", colours.invoke([{"role": "user", "content": content}]).text, "red")
    with row.shows("embeddings", note="With `check_embedding_ctx_length=False`."):
        vectors = OpenAIEmbeddings(
            model=EMBEDDER, base_url=f"{EMBEDDER_URL}/v1", api_key="none", check_embedding_ctx_length=False
        ).embed_documents(TEXTS)
        expect("lengths of vectors", [round(math.hypot(*vector), 4) for vector in vectors], [1.0] * len(TEXTS))
    row.shows_errors(ask)
