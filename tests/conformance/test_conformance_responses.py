"""The stateless Responses API, through the official client."""

import pytest
from octavo_testing.conformance import conforms
from octavo_testing.target import REAL_MODEL
from openai import BadRequestError, NotFoundError

pytestmark = pytest.mark.slow

CAPITAL = "What is the capital of France? Answer with one word."
KEY = "POST /v1/responses"


@pytest.mark.real_model
@conforms(KEY, "Answers a text or a list of items", how="openai")
def test_responses_api_answers(real):
    answer = real.openai.responses.create(model=REAL_MODEL, input=CAPITAL, temperature=0)
    assert (answer.object, answer.status, answer.store) == ("response", "completed", False)
    assert "Paris" in answer.output_text
    items = [{"role": "user", "content": CAPITAL}, *answer.output, {"role": "user", "content": "Say it again."}]
    again = real.openai.responses.create(model=REAL_MODEL, input=items, temperature=0, max_output_tokens=16)
    assert again.usage.input_tokens > answer.usage.input_tokens


@pytest.mark.real_model
@conforms(KEY, "Streams numbered events from `response.created` to `response.completed`", how="openai")
def test_responses_api_streams(real):
    with real.openai.responses.stream(model=REAL_MODEL, input=CAPITAL, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == final.output_text


@pytest.mark.real_model
@conforms(
    KEY,
    "Fields that need stored responses get a 400; reading a response gets a 404",
    how="openai",
)
def test_responses_are_not_stored(real):
    with pytest.raises(BadRequestError, match="send the whole conversation"):
        real.openai.responses.create(model=REAL_MODEL, input="hi", previous_response_id="resp_1")
    with pytest.raises(NotFoundError, match="stores no responses"):
        real.openai.responses.retrieve("resp_1")
