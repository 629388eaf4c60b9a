"""The OpenAPI document against the server, by schemathesis: whatever is sent, statuses, content types and bodies are as
declared, and never 5xx.

Not checked is that all that the schema excludes is refused: like vLLM, we read "1" as a number. Nor that all it allows
is accepted: rules between fields, and with the model's limits, are beyond a schema.
"""

import pytest
import schemathesis
from hypothesis import Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

pytestmark = pytest.mark.slow

#: Requests per operation: 12, with LONG=1 500.
EXAMPLES = settings.default.max_examples // 4
UNCHECKED = [negative_data_rejection, positive_data_acceptance]
#: Time limit of a request. Without it schemathesis gives up after 10 s, in which a busy machine may not generate
#: all that `n` or a list of prompts asks for. pytest-timeout ends a request that hangs, as it ends any test.
REQUEST_TIMEOUT_S = 600
WITH_BODY = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /invocations",
    "POST /v1/chat/completions/batch",
    "POST /v1/messages/count_tokens",
    "POST /v1/messages/render",
    "POST /v1/chat/completions/render",
    "POST /v1/completions/render",
    "POST /v1/responses/render",
    "POST /v1/responses/input_tokens",
    "POST /tokenize",
    "POST /detokenize",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
)
WITHOUT_BODY = (
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/responses/{response_id}/cancel",
    "POST /v1/responses/compact",
    "GET /v1/models",
    "GET /tokenizer_info",
    "GET /v1/models/{model}",
    "GET /health",
    "GET /ping",
    "POST /ping",
    "GET /version",
    "GET /load",
    "GET /metrics",
    "GET /ready",
    "GET /debug/requests",
    "POST /reset_mm_cache",
    "POST /reset_prefix_cache",
    "POST /sleep",
    "POST /wake_up",
    "GET /is_sleeping",
    "GET /server_info",
    "GET /kv/snapshot",
    "GET /kv/model",
)
#: Operations that would stop the server, or whose response never ends.
SPARED = ("GET /drain", "GET /kv/events")


@pytest.fixture(scope="package")
def operations(tiny):
    document = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    return {operation.label: operation for operation in (result.ok() for result in document.get_all_operations())}


def test_every_operation_of_the_document_is_tested_or_listed(operations):
    assert sorted(operations) == sorted((*WITH_BODY, *WITHOUT_BODY, *SPARED))
    assert sorted(label for label, operation in operations.items() if operation.body) == sorted(WITH_BODY)


CASES = [(label, GenerationMode.POSITIVE) for label in (*WITH_BODY, *WITHOUT_BODY)]
CASES += [(label, GenerationMode.NEGATIVE) for label in WITH_BODY]


@pytest.mark.parametrize(("label", "mode"), CASES, ids=lambda part: getattr(part, "value", part))
def test_the_server_conforms_to_the_document(operations, label, mode):
    """Each operation has a test and a time limit of its own: generating examples of a large body takes long."""
    check(operations[label], mode)


def check(operation, mode):
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case):
        case.call_and_validate(excluded_checks=UNCHECKED, timeout=REQUEST_TIMEOUT_S)

    conforms()


def test_invocations_declare_both_answers(tiny):
    paths = tiny.http.get("/openapi.json").json()["paths"]
    answer = paths["/invocations"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert [kind["$ref"].rpartition("/")[2] for kind in answer["anyOf"]] == ["ChatCompletion", "Completion"]


def test_a_stream_is_declared_beside_the_plain_answer(tiny):
    paths = tiny.http.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        done = paths[path]["post"]["responses"]["200"]["content"]
        assert set(done) == {"application/json", "text/event-stream"}
