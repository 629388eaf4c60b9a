"""langchain-anthropic: text, streams, a forced tool, structured output, an agent with a tool; errors."""

from asked import (
    ASK_FOR_SUMMARY,
    OBEYING,
    OBEYING_URL,
    QUESTION,
    REAL_MODEL,
    REAL_URL,
    SUMMARY,
    Call,
    City,
    Row,
    expect,
    get_weather,
)
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic


def ask(call: Call) -> None:
    chat = ChatAnthropic(
        model=call.model,
        base_url=call.url,
        api_key=call.key,
        max_tokens=50,
        max_retries=0,
        timeout=call.timeout_s,
        default_headers=call.headers,
        model_kwargs={"extra_body": call.fields},
    )
    if call.stream:
        list(chat.stream(call.prompt))
    else:
        chat.invoke(call.prompt)


row = Row("langchain-anthropic")
chat = ChatAnthropic(model=REAL_MODEL, base_url=REAL_URL, api_key="none", temperature=0, max_tokens=100, max_retries=0)
with row.shows("chat"):
    plain = chat.invoke(QUESTION)
    expect("name in the answer", "Paris" in plain.text, True)
    expect("output tokens", plain.usage_metadata["output_tokens"] > 0, True)
with row.shows("stream"):
    expect("streamed text", "".join(chunk.text for chunk in chat.stream(QUESTION)), plain.text)
with row.shows("tools"):
    called = chat.bind_tools([City], tool_choice="City").invoke(QUESTION)
    expect("forced tool", [call["name"] for call in called.tool_calls], ["City"])
    obeying = ChatAnthropic(model=OBEYING, base_url=OBEYING_URL, api_key="none", max_tokens=200, max_retries=0)
    agent = create_agent(obeying, tools=[get_weather])
    state = agent.invoke({"messages": [{"role": "user", "content": ASK_FOR_SUMMARY}]})
    expect("answer of an agent", state["messages"][-1].text, SUMMARY)
with row.shows("structured output"):
    for method in ("json_schema", "function_calling"):
        typed = chat.with_structured_output(City, method=method).invoke(QUESTION)
        expect(f"structured output by {method}", type(typed), City)
row.shows_errors(
    ask,
    {"overload (503)": "Anthropic's status is 529, which proxies do not know. The client sends both requests again."},
)
