"""Fields of `/v1/responses` that are shared with the chat API: each is honoured or refused by its name."""

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/responses"


async def post(served, **fields):
    return await served.http.post(PATH, json={"input": "hi", **fields})


async def test_structured_outputs_restrict_the_answer(served):
    assert (await post(served, structured_outputs={"choice": ["alpha", "beta"]})).status_code == 200
    (request,) = served.engine.requests
    assert "alpha" in request.grammar


async def test_structured_outputs_and_a_text_format_are_refused_together(served):
    fields = {"structured_outputs": {"choice": ["a"]}, "text": {"format": {"type": "text"}}}
    answer = await post(served, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


async def test_the_stop_string_is_included_on_request(served):
    answer = await post(served, stop="lo", include_stop_str_in_output=True)
    assert answer.json()["output"][0]["content"][0]["text"] == "Hello"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_xargs", {"a": 1}),
        ("kv_transfer_params", {"a": 1}),
        ("mm_processor_kwargs", {"a": 1}),
        ("previous_input_messages", [{"role": "user", "content": "a"}]),
        ("previous_response", {"id": "a"}),
        ("response_format", {"type": "json_object"}),
        ("use_beam_search", True),
        ("logits_processors", ["a"]),
    ],
)
async def test_fields_without_support_are_refused(served, name, value):
    answer = await post(served, **{name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert (await post(served, **{name: None})).status_code == 200
