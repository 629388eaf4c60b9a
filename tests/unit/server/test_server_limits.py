"""Limits of one request: an error names the field, the value, the limit and the flag."""

import json

import pytest
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest
from octavo_server.config import TEXT_BYTES, RequestLimits
from octavo_server.openai.json_bounds import check_json
from octavo_server.openai.limits import (
    MAX_FIELDS,
    MAX_LOGPROBS,
    check_chars,
    check_counts,
    check_fits,
    check_logprobs,
)
from octavo_testing.hostile_bodies import BATCH, PRODUCTS, product_body

LIMITS = RequestLimits(
    max_json_depth=4, max_json_values=40, max_messages=2, max_content_parts=3, max_tools=2, max_prompts=2, max_n=2,
    max_stop_strings=2, max_stop_chars=5, max_stop_strings_chars=8,
    max_stop_token_ids=2, max_bad_words=2, max_bad_words_chars=8, max_logit_bias=2, max_allowed_token_ids=2,
)  # fmt: skip
HELLO = {"role": "user", "content": "hi"}

CASES = {
    # fields within the limit, fields beyond it, named field, named flag
    "tools": ({"tools": [{}] * 2}, {"tools": [{}] * 3}, "tools", "--max-tools"),
    "prompts": ({"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt", "--max-prompts"),
    "token prompts": ({"prompt": [[1], [2]]}, {"prompt": [[1], [2], [3]]}, "prompt", "--max-prompts"),
    "n": ({"n": 2}, {"n": 3}, "n", "--max-n"),
    "stop": ({"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stop", "--max-stop-strings"),
    "stop length": ({"stop": "12345"}, {"stop": "123456"}, "stop", "--max-stop-chars"),
    "one long stop": ({"stop": ["a", "12345"]}, {"stop": ["a", "123456"]}, "stop", "--max-stop-chars"),
    "stop strings": ({"stop": ["1234"] * 2}, {"stop": ["1234", "12345"]}, "stop", "--max-stop-strings-chars"),
    "sequences": (
        {"stop_sequences": ["1234"] * 2}, {"stop_sequences": ["1234", "12345"]},
        "stop_sequences", "--max-stop-strings-chars",
    ),
    "stop_token_ids": ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "--max-stop-tok"),
    "bad_words": ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}, "bad_words", "--max-bad-words"),
    "bad word length": ({"bad_words": ["12345"]}, {"bad_words": ["123456"]}, "bad_words", "--max-stop-chars"),
    "bad words length": ({"bad_words": ["1234"] * 2}, {"bad_words": ["1234", "12345"]}, "bad_words", "--max-bad-"),
    "logit_bias": ({"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "--max-logit-"),
    "allowed": ({"allowed_token_ids": [1]}, {"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids", "--max-allowed-"),
}  # fmt: skip


def completion(**fields):
    return {"prompt": "a", **fields}


@pytest.mark.parametrize(("within", "beyond", "param", "flag"), CASES.values(), ids=CASES)
def test_counts_beyond_their_limits_are_rejected(within, beyond, param, flag):
    check_counts(completion(**within), LIMITS)
    with pytest.raises(InvalidRequest, match=r"limit") as caught:
        check_counts(completion(**beyond), LIMITS)
    assert caught.value.param == param
    assert flag in str(caught.value)


COPIED = {
    "stop": "abcde",
    "stop strings": ["abc", "de"],
    "stop_token_ids": [7] * 5,
    "bad_words": ["abc", "de"],
    "logit_bias": {str(i): 1 for i in range(5)},
    "allowed_token_ids": [7] * 5,
    "logprob_token_ids": [*range(5)],
}
SEQUENCES = {  # five of them
    "prompt": {"prompt": ["a"] * 5},
    "n": {"prompt": "a", "n": 5},
    "messages": {"messages": [[HELLO]] * 5},
}


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("copied", COPIED)
def test_sequences_times_copied_entries_are_bounded(copied, sequences):
    body = {**SEQUENCES[sequences], copied.partition(" ")[0]: COPIED[copied]}
    check_counts(body, RequestLimits(max_json_values=25))
    words = r"5 sequences .* 5 entries .* 25 in all, more than 24, the limit.*--max-json-values"
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_counts(body, RequestLimits(max_json_values=24))
    assert caught.value.param == sequences


def test_copied_entries_of_all_fields_count_together():
    body = {"prompt": ["a"] * 5, "stop_token_ids": [7] * 3, "allowed_token_ids": [7] * 2}
    check_counts(body, RequestLimits(max_json_values=25))
    with pytest.raises(InvalidRequest):
        check_counts(body, RequestLimits(max_json_values=24))


@pytest.mark.parametrize("fields", [{}, {"n": 1}, {"prompt": ["a"]}, {"n": "5"}, {"messages": [HELLO] * 5}])
def test_entries_of_one_sequence_may_exceed_that_bound(fields):
    check_counts({"prompt": "a", "allowed_token_ids": [7] * 5, **fields}, RequestLimits(max_json_values=4))


@pytest.mark.parametrize("is_beyond", [False, True], ids=["within", "beyond"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_two_fields_at_their_limits_are_bounded(name, is_beyond):
    """The fast twin of `tests/hostile/test_hostile_bodies.py`."""
    limits = RequestLimits()
    path, raw = product_body(name, is_beyond=is_beyond)
    body = json.loads(raw)
    check_json(raw, limits)
    assert len(raw) <= TEXT_BYTES
    num_prompts = len(body["messages"]) if path == BATCH else len(body.get("prompt", "a"))
    num_entries = sum(
        len("".join(body[f])) if f in ("stop", "bad_words") else len(body[f]) for f in body if f in COPIED
    )
    num_in_all = num_prompts * body.get("n", 1) * num_entries
    if num_prompts * body.get("n", 1) > 1 and num_in_all > limits.max_json_values:
        assert is_beyond
        with pytest.raises(
            InvalidRequest, match=rf"{num_in_all} in all, more than {limits.max_json_values}, the limit"
        ):
            check_counts(body, limits)
    else:
        check_counts(body, limits)


def test_too_many_messages_are_rejected():
    check_counts({"messages": [HELLO] * 2}, LIMITS)
    with pytest.raises(InvalidRequest, match=r"messages holds 3 entries, more than 2, the limit.*--max-messages"):
        check_counts({"messages": [HELLO] * 3}, LIMITS)


@pytest.mark.parametrize(("name", "field"), [("messages", "content"), ("input", "content"), ("input", "output")])
def test_too_many_content_parts_are_rejected(name, field):
    parts = [{"type": "text", "text": "a"}]
    check_counts({name: [{field: parts * 3}, {field: "a"}]}, LIMITS)
    with pytest.raises(InvalidRequest, match=r"holds 4 entries, more than 3, the limit.*--max-content-parts") as caught:
        check_counts({name: [{field: parts * 2}, {field: parts * 2}]}, LIMITS)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "fields", [{"messages": 1}, {"messages": [1, {"content": 2}]}, {"stop": [1, None]}, {"n": "9"}]
)
def test_wrong_types_are_ignored_by_the_limits(fields):
    check_counts(fields, LIMITS)


@pytest.mark.parametrize("prompt", ["a" * 100, [1] * 100], ids=["text", "ids"])
def test_prompt_of_token_ids_counts_as_one(prompt):
    check_counts(completion(prompt=prompt), LIMITS)


@pytest.mark.parametrize(
    "body",
    [b"", b"[[[[]]]]", b'{"a": [{"b": [1]}]}', b"[]" * 20, b'"' + b"[" * 20 + b'"', b'["\\"[[[[[[", {}]', b"]]]]]]"],
)
def test_shallow_bodies_are_accepted(body):
    check_json(body, LIMITS)


@pytest.mark.parametrize("body", [b"[" * 5, b'{"a":' * 30, b'["[[", [[[[1]]]]]', b'{"x": "\\\\", "y": [[[[1]]]]}'])
def test_deep_bodies_are_rejected(body):
    with pytest.raises(InvalidRequest, match=r"more than 4 levels deep, the limit.*--max-json-depth"):
        check_json(body, LIMITS)


@pytest.mark.parametrize(
    "body", [b'"\\\\' * 400_000, b'"' * 1_000_001 + b"[" * 9, b'["' + b'\\"' * 400_000], ids=range(3)
)
def test_unclosed_strings_take_no_time(body):
    check_json(body, LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * 38 + b"1]",
        b'["' + b",[{" * 400_000 + b'"]',
        b'{"a": "' + b'\\",[' * 400_000 + b'"}',
        b"[" + b'"a, b", ' * 39 + b'"c"]',
    ],
    ids=["numbers", "text of separators", "text of escapes", "texts with commas"],
)
def test_bodies_with_few_values_are_accepted(body):
    check_json(body, LIMITS)


@pytest.mark.parametrize(
    "body",
    [b"[" + b"1," * 40 + b"1]", b"[" * 41, b'{"a":0,' * 21, b'["\\\\",' + b'"",' * 40, b'["",' + b'"[",' * 40],
    ids=["numbers", "brackets", "objects", "behind an escape", "strings"],
)
def test_bodies_with_many_values_are_rejected(body):
    with pytest.raises(InvalidRequest, match=r"more than 40 values, the limit.*--max-json-values"):
        check_json(body, LIMITS)


def test_prompts_of_many_token_ids_are_within_the_default_limits():
    body = b'{"prompt":[' + b",".join([b"[" + b",".join([b"128000"] * 131_072) + b"]"] * 3) + b"]}"
    check_json(body, RequestLimits())
    assert len(body) < TEXT_BYTES


def test_text_that_cannot_fit_is_rejected_without_tokenising():
    check_fits("x" * 30, max_model_len=10, longest_token=3)
    with pytest.raises(ContextLengthExceeded, match="at least 11 input tokens"):
        check_fits("x" * 31, max_model_len=10, longest_token=3)


def test_text_too_long_to_tokenise_is_rejected():
    limits = RequestLimits(max_prompt_chars=10)
    check_chars("x" * 10, limits)
    with pytest.raises(InvalidRequest, match=r"has 11 characters, the limit is 10: .*--max-prompt-chars"):
        check_chars("x" * 11, limits)


def test_too_many_log_probabilities_are_rejected():
    check_logprobs(MAX_LOGPROBS)
    with pytest.raises(InvalidRequest, match=r"up to 10000001 log-probabilities .*, more than 10000000, the limit"):
        check_logprobs(MAX_LOGPROBS + 1)


def test_body_with_too_many_fields_is_rejected():
    body = {f"x{number}": 0 for number in range(MAX_FIELDS + 1)}
    with pytest.raises(InvalidRequest, match=rf"{MAX_FIELDS + 1} fields, the limit is {MAX_FIELDS}"):
        check_counts(body, RequestLimits())
    body.popitem()
    check_counts(body, RequestLimits())
