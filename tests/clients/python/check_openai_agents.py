"""openai-agents: agents with a tool and with an output type, over responses and over chat, whole and streamed."""

import asyncio

import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from asked import (
    ASK_FOR_CITY,
    ASK_FOR_SUMMARY,
    OBEYING,
    OBEYING_URL,
    REAL_MODEL,
    REAL_URL,
    SUMMARY,
    WARM_PARIS,
    City,
    expect,
)
from asked import get_weather as weather_of


@function_tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return weather_of(city)


async def main() -> None:
    set_tracing_disabled(True)
    obeying = openai.AsyncOpenAI(base_url=f"{OBEYING_URL}/v1", api_key="none", max_retries=0)
    real = openai.AsyncOpenAI(base_url=f"{REAL_URL}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=OBEYING, openai_client=obeying)
        agent = Agent(name="weather", model=model, tools=[get_weather])
        expect(f"answer of {kind.__name__}", (await Runner.run(agent, ASK_FOR_SUMMARY)).final_output, SUMMARY)
        streamed = Runner.run_streamed(agent, ASK_FOR_SUMMARY)
        async for _ in streamed.stream_events():
            pass
        expect(f"streamed answer of {kind.__name__}", streamed.final_output, SUMMARY)
        typed = Agent(name="weather", model=model, tools=[get_weather], output_type=City)
        expect(f"typed answer of {kind.__name__}", (await Runner.run(typed, ASK_FOR_CITY)).final_output, WARM_PARIS)
        typed = Agent(
            name="city", model=kind(model=REAL_MODEL, openai_client=real), tools=[get_weather], output_type=City
        )
        result = await Runner.run(typed, "Name a city.", max_turns=2)
        expect(f"typed answer of SmolLM2 by {kind.__name__}", type(result.final_output), City)


asyncio.run(main())
