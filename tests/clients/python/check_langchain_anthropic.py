"""langchain-anthropic: text, streams, a forced tool, structured output, an agent with a tool."""

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
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic

chat = ChatAnthropic(model=REAL_MODEL, base_url=REAL_URL, api_key="none", temperature=0, max_tokens=100, max_retries=0)
plain = chat.invoke(QUESTION)
expect("streamed text", "".join(chunk.text for chunk in chat.stream(QUESTION)), plain.text)
expect("output tokens", plain.usage_metadata["output_tokens"] > 0, True)
called = chat.bind_tools([City], tool_choice="City").invoke(QUESTION)
expect("forced tool", [call["name"] for call in called.tool_calls], ["City"])
for method in ("json_schema", "function_calling"):
    typed = chat.with_structured_output(City, method=method).invoke(QUESTION)
    expect(f"structured output by {method}", type(typed), City)
obeying = ChatAnthropic(model=OBEYING, base_url=OBEYING_URL, api_key="none", max_tokens=200, max_retries=0)
state = create_agent(obeying, tools=[get_weather]).invoke({"messages": [{"role": "user", "content": ASK_FOR_SUMMARY}]})
expect("answer of an agent", state["messages"][-1].text, SUMMARY)
