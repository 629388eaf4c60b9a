"""langchain-openai: text, streams, bound tools, structured output; an agent with a tool and a response format."""

from asked import (
    ASK_FOR_CITY,
    ASK_FOR_SUMMARY,
    OBEYING,
    OBEYING_URL,
    QUESTION,
    REAL_MODEL,
    REAL_URL,
    SUMMARY,
    WARM_PARIS,
    City,
    expect,
    get_weather,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

for responses in (False, True):
    case = "responses" if responses else "chat"
    settings = {"api_key": "none", "max_retries": 0, "use_responses_api": responses}
    chat = ChatOpenAI(model=REAL_MODEL, base_url=f"{REAL_URL}/v1", temperature=0, max_tokens=100, **settings)
    plain = chat.invoke(QUESTION)
    expect(f"streamed text, {case}", "".join(chunk.text for chunk in chat.stream(QUESTION)), plain.text)
    called = chat.bind_tools([convert_to_openai_tool(City)], tool_choice="required", parallel_tool_calls=False).invoke(
        QUESTION
    )
    expect(f"required tool, {case}", [call["name"] for call in called.tool_calls], ["City"])
    for method in ("json_schema", "function_calling"):
        typed = chat.with_structured_output(City, method=method).invoke(QUESTION)
        expect(f"structured output by {method}, {case}", type(typed), City)
    obeying = ChatOpenAI(model=OBEYING, base_url=f"{OBEYING_URL}/v1", **settings)
    agent = create_agent(obeying, tools=[get_weather])
    state = agent.invoke({"messages": [{"role": "user", "content": ASK_FOR_SUMMARY}]})
    expect(f"answer of an agent, {case}", state["messages"][-1].text, SUMMARY)
    agent = create_agent(obeying, tools=[get_weather], response_format=ProviderStrategy(City))
    state = agent.invoke({"messages": [{"role": "user", "content": ASK_FOR_CITY}]})
    expect(f"typed answer of an agent, {case}", state["structured_response"], WARM_PARIS)
