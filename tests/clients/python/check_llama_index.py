"""llama-index: `OpenAILike` on text, streams, tools and types; `OpenAILikeEmbedding`; `CohereRerank`; errors."""

import math

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
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank


def model(name: str, url: str, **settings: object) -> OpenAILike:
    defaults = {"api_key": "none", "is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(model=name, api_base=f"{url}/v1", **(defaults | settings))


def ask(call: Call) -> None:
    asked = model(
        call.model,
        call.url,
        api_key=call.key,
        timeout=call.timeout_s,
        default_headers=call.headers,
        additional_kwargs={"extra_body": call.fields},
    )
    messages = [ChatMessage(role="user", content=call.prompt)]
    if call.stream:
        list(asked.stream_chat(messages))
    else:
        asked.chat(messages)


row = Row("llama-index, OpenAILike")
real = model(REAL_MODEL, REAL_URL, temperature=0, max_tokens=100)
obeying = model(OBEYING, OBEYING_URL)
messages = [ChatMessage(role="user", content=QUESTION)]
with row.shows("chat"):
    plain = real.chat(messages).message.content
    expect("name in the answer", "Paris" in plain, True)
with row.shows("stream"):
    expect("streamed text", "".join(chunk.delta or "" for chunk in real.stream_chat(messages)), plain)
with row.shows("tools"):
    tool = FunctionTool.from_defaults(get_weather)
    expect("answer after the tool", obeying.predict_and_call([tool], ASK_FOR_SUMMARY).response, "21 degrees")
    history = [ChatMessage(role="user", content=ASK_FOR_SUMMARY)]
    called = obeying.chat_with_tools([tool], chat_history=history)
    (call,) = obeying.get_tool_calls_from_response(called)
    result = ChatMessage(
        role="tool", content=get_weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}
    )
    after = obeying.chat_with_tools([tool], chat_history=[*history, called.message, result])
    expect("answer after a tool by hand", after.message.content, SUMMARY)
with row.shows("structured output"):
    typed = real.as_structured_llm(City).chat(messages)
    expect("structured output", type(typed.raw), City)
with row.shows("images"):
    colours = model(COLOURS, COLOURS_URL, temperature=0, max_tokens=1)
    image = ImageBlock(image=RED_PNG.encode(), image_mimetype="image/png")
    shown = ChatMessage(role="user", blocks=[image, TextBlock(text=COLOUR_QUESTION)])
    expect("colour", colours.chat([shown]).message.content, "red")
with row.shows("embeddings"):
    embedder = OpenAILikeEmbedding(model_name=EMBEDDER, api_base=f"{EMBEDDER_URL}/v1", api_key="none", max_retries=0)
    vectors = embedder.get_text_embedding_batch(TEXTS)
    expect("lengths of vectors", [round(math.hypot(*vector), 4) for vector in vectors], [1.0] * len(TEXTS))
with row.shows("rerank"):
    reranker = CohereRerank(model=EMBEDDER, api_key="none", base_url=EMBEDDER_URL, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    best, _ = reranker.postprocess_nodes(nodes, query_str=TEXTS[1])
    expect("nearest document", best.text, TEXTS[1])
row.shows_errors(ask)
