"""The OpenAPI document against the server, by schemathesis: whatever is sent, statuses, content types and bodies are as
declared, and never 5xx.

Not checked is that all that the schema excludes is refused: like vLLM, we read "1" as a number. Nor that all it allows
is accepted: rules between fields, and with the model's limits, are beyond a schema.
"""

import schemathesis
from hypothesis import Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

EXAMPLES = 25
UNCHECKED = [negative_data_rejection, positive_data_acceptance]
#: One would end the server, the other's answer never ends.
SPARED = ("/drain", "/kv/events")


def test_the_server_does_what_the_document_says(tiny):
    document = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        if operation.path not in SPARED:
            modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
            for mode in modes:
                check(operation, mode)


def check(operation, mode):
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case):
        case.call_and_validate(excluded_checks=UNCHECKED)

    conforms()


def test_a_stream_is_declared_beside_the_plain_answer(tiny):
    paths = tiny.http.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        done = paths[path]["post"]["responses"]["200"]["content"]
        assert set(done) == {"application/json", "text/event-stream"}
