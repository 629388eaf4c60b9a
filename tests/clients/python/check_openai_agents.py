"""openai-agents: agents with a tool and with an output type, over responses and over chat, whole and streamed."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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
    Row,
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
        row = Row(f"openai-agents, {kind.__name__}")
        model = kind(model=OBEYING, openai_client=obeying)
        agent = Agent(name="weather", model=model, tools=[get_weather])
        with row.shows("chat", "tools"):
            expect("answer", (await Runner.run(agent, ASK_FOR_SUMMARY)).final_output, SUMMARY)
        with row.shows("stream"):
            streamed = Runner.run_streamed(agent, ASK_FOR_SUMMARY)
            async for _ in streamed.stream_events():
                pass
            expect("streamed answer", streamed.final_output, SUMMARY)
        with row.shows("structured output"):
            typed = Agent(name="weather", model=model, tools=[get_weather], output_type=City)
            expect("typed answer", (await Runner.run(typed, ASK_FOR_CITY)).final_output, WARM_PARIS)
            small = kind(model=REAL_MODEL, openai_client=real)
            settings = ModelSettings(max_tokens=200, temperature=0)
            typed = Agent(name="city", model=small, output_type=City, model_settings=settings)
            result = await Runner.run(typed, "Name a city.")
            expect("typed answer of SmolLM2", type(result.final_output), City)


asyncio.run(main())
