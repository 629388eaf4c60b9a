"""Arguments of any type to `AsyncLLM.generate`: only the request that has them may fail."""

import asyncio
import math
import resource
from contextlib import suppress
from dataclasses import fields, replace

import pytest
from octavo_engine.frontend.request_builder import Frontend, TokenizedPrompt
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.core_process import collect, joined_text, running
from octavo_testing.scripted import scripted, write_byte_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD = (
    None,
    True,
    1,
    0,
    -1,
    2**70,
    -(2**70),
    0.5,
    math.nan,
    math.inf,
    "x",
    "",
    b"x",
    [],
    [1, "x"],
    {},
    {1: 2},
    object(),
)
REQUEST_ARGUMENTS = ("priority", "tenant", "weight", "arrival_s", "start_by_s", "cache_salt")


@pytest.fixture(scope="module")
def config(tmp_path_factory, scripted_tmp):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(folder), load_format="dummy", max_model_len=512, scheduling_policy="priority")


async def succeeds_or_is_refused(llm, prompt, make_params, **arguments):
    with suppress(InvalidRequest):
        await collect(llm, prompt, make_params(), **arguments)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
async def test_no_type_of_a_sampling_parameter_ends_other_requests(llm, name):
    for value in ODD:
        given = {"max_tokens": 3, "seed": 0, name: value}
        await succeeds_or_is_refused(llm, "hi", lambda given=given: SamplingParams(**given))
    assert joined_text(await collect(llm, "hi", scripted("fine"))) == "fine"


@pytest.mark.parametrize("name", REQUEST_ARGUMENTS)
async def test_no_type_of_a_request_argument_ends_other_requests(llm, name):
    for value in ODD:
        await succeeds_or_is_refused(llm, "hi", lambda: scripted("abc"), **{name: value})
    assert joined_text(await collect(llm, "hi", scripted("fine"))) == "fine"


async def test_no_type_of_a_prompt_ends_other_requests(llm):
    for value in ODD:
        prompts = (value, {"prompt": value}, {"prompt_token_ids": value}, {"prompt": "hi", "cache_salt": value})
        for prompt in prompts:
            await succeeds_or_is_refused(llm, prompt, lambda: scripted("abc"))
    assert joined_text(await collect(llm, "hi", scripted("fine"))) == "fine"


async def test_a_value_that_cannot_be_sent_is_refused(llm):
    for extra in ({"x": object()}, {"x": 2**70}):
        with pytest.raises(InvalidRequest, match="can't be sent"):
            await collect(llm, "hi", SamplingParams(extra_args=extra))


async def test_a_schema_may_hold_integers_beyond_64_bits(llm):
    uint256 = StructuredOutputs(json={"type": "integer", "minimum": 0, "maximum": 2**256, "default": 2**200})
    outputs = await collect(llm, "hi", scripted("7", structured_outputs=uint256))
    assert joined_text(outputs) == "7"


async def test_a_trace_that_cannot_grow_ends_alone(config, tmp_path, monkeypatch):
    trace = tmp_path / "trace.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))  # inherited by the core
    try:
        async with running(replace(config, trace=str(trace))) as llm:
            answers = await asyncio.gather(*(collect(llm, "hi", scripted("abc" * 20), f"r{i}") for i in range(3)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [joined_text(answer) for answer in answers] == ["abc" * 20] * 3
    assert trace.stat().st_size <= 6000


async def test_unseeded_requests_differ_between_replicas_unless_a_seed_is_set(config):
    def first_seed(seed):
        frontend = Frontend.load(replace(config, seed=seed))
        prompt = TokenizedPrompt(text=None, token_ids=[65])
        return frontend.build(prompt, frontend.resolve(SamplingParams()), request_id="r").params.seed

    assert first_seed(None) != first_seed(None)
    assert first_seed(7) == first_seed(7) != first_seed(8)
