"""pydantic-ai: tools, typed answers by a tool and by a native format, over chat, responses and messages."""

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
    get_weather,
)
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

for kind, provider, path in (
    (OpenAIChatModel, OpenAIProvider, "/v1"),
    (OpenAIResponsesModel, OpenAIProvider, "/v1"),
    (AnthropicModel, AnthropicProvider, ""),
):
    row = Row(f"pydantic-ai, {kind.__name__}")
    model = kind(OBEYING, provider=provider(base_url=OBEYING_URL + path, api_key="none"))
    with row.shows("chat", "tools"):
        expect("answer", Agent(model, tools=[get_weather]).run_sync(ASK_FOR_SUMMARY).output, SUMMARY)
    with row.shows("structured output"):
        if kind is not AnthropicModel:
            native = Agent(model, tools=[get_weather], output_type=NativeOutput(City, strict=True))
            expect("native typed answer", native.run_sync(ASK_FOR_CITY).output, WARM_PARIS)
        real = kind(REAL_MODEL, provider=provider(base_url=REAL_URL + path, api_key="none"))
        typed = Agent(real, output_type=City, model_settings={"max_tokens": 200}, retries=0)
        expect("typed answer of SmolLM2", type(typed.run_sync("Name a city.").output), City)
