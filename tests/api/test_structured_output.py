"""Structured output through the whole engine, with a tiny random model: every output follows its grammar."""

import json
import re

import jsonschema
import pytest
from octavo_engine import LLM, SamplingParams, StructuredOutputs
from octavo_engine.core.replay import replay_file
from octavo_engine.wire.errors import InvalidRequest
from octavo_testing.scripted import EOS, write_byte_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "bc", None]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"anyOf": [{"const": 1}, {"type": "boolean"}]}},
}
BYTES = {chr(i): i for i in range(128)}


def shaped(*, max_tokens=150, seed=1, **fields):
    names = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace")
    shape = StructuredOutputs(**{name: fields.pop(name) for name in names if name in fields})
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=shape, **fields)


def make_llm(folder, **arguments):
    tiny = {"load_format": "dummy", "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 256}
    return LLM(str(folder), debug_invariants=True, num_threads=1, **{**tiny, **arguments})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    llm = make_llm(folder)
    yield llm
    llm.shutdown()


def generate(llm, *params):
    return llm.generate(["Say it:"] * len(params), list(params), use_tqdm=False)


def only(llm, params):
    ((output,),) = [generate(llm, params)]
    return output.outputs[0], output.error


@pytest.mark.parametrize("temperature", [0, 1.0, 2.0])
def test_different_grammars_run_in_one_batch(llm, temperature):
    same = {"temperature": temperature}
    outputs = generate(
        llm,
        shaped(json=SCHEMA, disable_any_whitespace=True, **same),
        shaped(regex=r"\d{3}-[a-f]{2}", **same),
        shaped(choice=["yes", "no, never"], **same),
        shaped(grammar='root ::= "<" [0-9]{2,3} ">"', **same),
        SamplingParams(max_tokens=20, seed=1, **same),
    )
    texts = [output.outputs[0].text for output in outputs]
    assert [output.outputs[0].finish_reason for output in outputs[:4]] == ["stop"] * 4
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch(r"\d{3}-[a-f]{2}", texts[1])
    assert texts[2] in ("yes", "no, never")
    assert re.fullmatch("<[0-9]{2,3}>", texts[3])


def test_result_does_not_depend_on_other_requests(llm):
    alone = [only(llm, shaped(json=SCHEMA, seed=seed))[0].token_ids for seed in range(4)]
    crowd = generate(llm, *(shaped(json=SCHEMA, seed=seed) for seed in range(4)), SamplingParams(max_tokens=60))
    assert [output.outputs[0].token_ids for output in crowd[:4]] == alone


def test_each_fork_follows_the_grammar(llm):
    params = shaped(json=SCHEMA, n=4)
    (output,) = generate(llm, params)
    assert len({sequence.text for sequence in output.outputs}) > 1
    for sequence in output.outputs:
        assert sequence.finish_reason == "stop"
        jsonschema.validate(json.loads(sequence.text), SCHEMA)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequence_continues_its_grammar(llm, folder, mode):
    params = [shaped(regex="[a-z ]{60,70}[.]", seed=seed) for seed in range(8)]
    expected = [output.outputs[0].token_ids for output in generate(llm, *params)]
    pressed = make_llm(folder, num_gpu_blocks_override=18, swap_space=0.001, preemption_mode=mode)
    outputs = generate(pressed, *params)
    assert pressed.stats.preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected
    pressed.shutdown()


def test_trace_with_grammars_replays(folder, tmp_path):
    llm = make_llm(folder, trace=str(tmp_path / "trace"))
    generate(llm, shaped(json=SCHEMA), shaped(choice=["a", "b"], n=2), SamplingParams(max_tokens=5))
    llm.shutdown()
    assert '"prepared"' in (tmp_path / "trace").read_text()
    report = replay_file(tmp_path / "trace")
    assert report.ok, str(report)


def test_min_tokens_and_ignore_eos_apply_while_the_grammar_allows_more(llm):
    assert len(only(llm, shaped(regex="a{1,9}", min_tokens=6))[0].text) >= 6
    for rule in ({"ignore_eos": True}, {"min_tokens": 50}):
        output, _ = only(llm, shaped(regex="a{1,9}", **rule))
        assert (output.text, output.finish_reason) == ("a" * 9, "stop")


def test_length_limit_ends_an_incomplete_output(llm):
    output, error = only(llm, shaped(regex="a{20}", max_tokens=5))
    assert (output.text, output.finish_reason, error) == ("aaaaa", "length", None)


def test_stop_string_ends_a_structured_output(llm):
    output, _ = only(llm, shaped(regex="abcabc", stop="ca"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "ca")


def test_stop_token_may_end_a_grammar_that_may_end(llm):
    stop = BYTES["!"]
    biased = shaped(regex="a+", stop_token_ids=[stop], logit_bias={stop: 100, EOS: -100}, max_tokens=30)
    output, _ = only(llm, biased)
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert set(output.text) == {"a"}


def test_biases_and_bans_apply_to_allowed_tokens(llm):
    likes_b = shaped(choice=["ab", "ba"], logit_bias={BYTES["b"]: 100, BYTES["z"]: 100})
    assert only(llm, likes_b)[0].text == "ba"
    assert only(llm, shaped(choice=["ab", "ba"], bad_words=["b"], seed=3))[1] is not None
    keeps = shaped(regex="[abc]{4}", allowed_token_ids=[BYTES["c"], EOS])
    assert only(llm, keeps)[0].text == "cccc"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (shaped(regex="[abc]{4}", allowed_token_ids=[BYTES["x"]]), "leave no token"),
        (shaped(grammar="root ::= root"), "follow its grammar"),
    ],
    ids=["masks exclude each other", "a grammar without an end"],
)
def test_empty_mask_ends_only_its_sequence(llm, params, words):
    failed, finished = generate(llm, params, shaped(choice=["yes"]))
    assert failed.outputs[0].finish_reason == "error"
    assert words in failed.error
    assert finished.outputs[0].text == "yes"


def test_logprobs_cover_only_allowed_tokens(llm):
    output, _ = only(llm, shaped(choice=["a", "b"], logprobs=2))
    assert output.logprobs is not None
    first = {token: entry.logprob for token, entry in output.logprobs[0].items()}
    assert first.keys() >= {BYTES["a"], BYTES["b"]}
    assert sum(2.718281828 ** first[BYTES[c]] for c in "ab") == pytest.approx(1, abs=1e-4)


def test_special_tokens_are_spelled_out_in_strings(llm):
    output, _ = only(llm, shaped(choice=["<|im_end|>"]))
    assert output.text == "<|im_end|>"
    assert output.token_ids[:-1] == list(b"<|im_end|>")


def test_unenforceable_grammar_is_rejected_before_it_runs(llm):
    with pytest.raises(InvalidRequest, match="#/properties/a/not"):
        generate(llm, shaped(json={"properties": {"a": {"not": {}}}}))
