"""Values that ask for nothing are accepted, as SDKs write out defaults and nulls: for every field of every request."""

import codecs
import json

import pytest
from octavo_server.anthropic.messages import CountTokensRequest, MessagesRequest
from octavo_server.api.chat_batch import BatchChatRequest
from octavo_server.api.scoring import RerankRequest, ScoreRequest
from octavo_server.api.tokens import DetokenizeRequest, TokenizeRequest
from octavo_server.config import RequestLimits
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.embedding import EmbeddingRequest
from octavo_server.openai.request_parser import parse_request
from octavo_server.openai.responses import ResponsesRequest
from octavo_server.openai.structured import StructuredOutputsBody
from octavo_server.openai.unsupported import _ALLOWED_IF, _REFUSED, _REPLACED

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = [{"role": "user", "content": "hi"}]
REQUESTS = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": CHAT}),
    "/v1/chat/completions/batch": (BatchChatRequest, {"messages": [CHAT]}),
    "/v1/responses": (ResponsesRequest, {"input": "hi"}),
    "/v1/messages": (MessagesRequest, {"messages": CHAT, "max_tokens": 4}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": CHAT}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [65]}),
}
VECTORS = {EmbeddingRequest: {"input": "a"}, ScoreRequest: {"text_1": "a", "text_2": "b"},
           RerankRequest: {"query": "a", "documents": ["b"]}}  # fmt: skip
TEXT_FORMAT = {"type": "text"}
UNSET_SHAPE = dict.fromkeys(["json", *(set(StructuredOutputsBody.model_fields) - {"json_"})])
#: Field -> the values of it that ask for nothing. Fields that aren't here are nullable only.
NOTHING = {
    **dict.fromkeys(("stream", "ignore_eos", "use_beam_search", "include_stop_str_in_output", "echo"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "skip_reading_prefix_cache"), (False,)),
    **dict.fromkeys(("continue_final_message", "guided_json_object", "return_token_strs", "background"), (False,)),
    **dict.fromkeys(("logprobs", "enable_response_messages"), (False,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty", "length_penalty", "n", "stream_interval"), (1,)),
    **dict.fromkeys(("top_k", "thinking_token_budget"), (-1,)),
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words", "tools", "logprob_token_ids", "include"), ([],)),
    **dict.fromkeys(("stop_sequences", "system"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "metadata", "reasoning", "output_config"), ({},)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "include_reasoning"), (True,)),
    **dict.fromkeys(("add_generation_prompt", "parallel_tool_calls", "store"), (True,)),
    "text": [{}, {"format": None}, {"format": TEXT_FORMAT}],
    "response_format": [TEXT_FORMAT],
    "structured_outputs": [{}, UNSET_SHAPE, {"json_object": False, "disable_any_whitespace": False}],
    "stream_options": [{}, {"include_usage": False}, {"include_usage": None, "continuous_usage_stats": False}],
    "tool_choice": ["none", "auto"],
    "top_logprobs": [0],
    "truncation": ["disabled"],
    "truncation_side": ["left"],
    "chat_template": [""],
    "encoding_format": ["float"],
    "top_n": [0],
    "function_call": ["none"],
    "modalities": [["text"]],
    "best_of": [1],
    "suffix": [""],
}  # fmt: skip
UNSUPPORTED = (*_REFUSED, *_REPLACED, *_ALLOWED_IF)


def values_of(kind, name):
    if name == "tool_choice" and issubclass(kind, CountTokensRequest):
        return [{"type": "none"}, {"type": "auto"}]
    if name == "top_k" and issubclass(kind, CountTokensRequest):
        return []
    values = NOTHING.get(name, [])
    return [*values, 0] if name == "top_k" else values


def cases():
    for path, (kind, least) in REQUESTS.items():
        optional = [name for name in kind.model_fields if name not in least]
        unsupported = [] if issubclass(kind, CountTokensRequest) else UNSUPPORTED
        extra = [name for name in unsupported if name not in kind.model_fields]
        nulls = dict.fromkeys([*optional, *extra])
        yield pytest.param(path, {**nulls, **least}, id=f"{path} nulls")
        spelt = {name: values_of(kind, name)[0] for name in [*optional, *extra] if values_of(kind, name)}
        yield pytest.param(path, {**spelt, **least}, id=f"{path} all")
        for name in [*optional, *extra]:
            for number, value in enumerate(values_of(kind, name)):
                yield pytest.param(path, {**least, name: value}, id=f"{path} {name} {number}")


@pytest.mark.parametrize(("path", "body"), [*cases()])
async def test_a_value_that_asks_for_nothing_is_accepted(served, path, body):
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", VECTORS)
async def test_vectors_with_values_that_ask_for_nothing(kind):
    nulls = {name: None for name in kind.model_fields if name not in VECTORS[kind]}
    of_text = {"stream": False, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "n": 1,
               "encoding_format": "float", "embed_dtype": "float32"}  # fmt: skip
    for fields in (nulls, of_text, dict.fromkeys(of_text)):
        parse_request(json.dumps({**fields, **VECTORS[kind]}).encode(), kind, RequestLimits()).check()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_without_prompt_logprobs(served, path):
    _, least = REQUESTS[path]
    body = {**least, "stream": True, "stream_options": {}, "prompt_logprobs": 0}
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert served.engine.requests[0].params.prompt_logprobs is None


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_byte_order_mark_before_the_body(served, path):
    content = codecs.BOM_UTF8 + json.dumps(REQUESTS[path][1]).encode()
    answer = await served.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


async def test_the_parts_of_a_tool_may_be_null(served):
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    body = {"messages": CHAT, "tools": [{"type": None, "function": function}], "tool_choice": "none"}
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
