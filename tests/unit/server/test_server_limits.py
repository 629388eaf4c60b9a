"""What one request may ask for: a refusal that names the field, the value, the limit and the flag."""

import pytest
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest
from octavo_server.config import RequestLimits
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.limits import check_chars, check_counts, check_depth, check_fits

LIMITS = RequestLimits(
    max_json_depth=4, max_messages=2, max_prompts=2, max_n=2, max_stop_strings=2, max_stop_chars=5,
    max_stop_token_ids=2, max_bad_words=2, max_logit_bias=2, max_allowed_token_ids=2,
)  # fmt: skip
HELLO = {"role": "user", "content": "hi"}

CASES = {
    # fields within the limit, beyond it, the field named, the flag named
    "prompts": ({"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt", "--max-prompts"),
    "token prompts": ({"prompt": [[1], [2]]}, {"prompt": [[1], [2], [3]]}, "prompt", "--max-prompts"),
    "n": ({"n": 2}, {"n": 3}, "n", "--max-n"),
    "stop": ({"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stop", "--max-stop-strings"),
    "stop length": ({"stop": "12345"}, {"stop": "123456"}, "stop", "--max-stop-chars"),
    "one long stop": ({"stop": ["a", "12345"]}, {"stop": ["a", "123456"]}, "stop", "--max-stop-chars"),
    "stop_token_ids": ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "--max-stop-tok"),
    "bad_words": ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}, "bad_words", "--max-bad-words"),
    "bad word length": ({"bad_words": ["12345"]}, {"bad_words": ["123456"]}, "bad_words", "--max-stop-chars"),
    "logit_bias": ({"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "--max-logit-"),
    "allowed": ({"allowed_token_ids": [1]}, {"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids", "--max-allowed-"),
}  # fmt: skip


def completion(**fields):
    return CompletionRequest.model_validate({"prompt": "a", **fields})


@pytest.mark.parametrize(("within", "beyond", "param", "flag"), CASES.values(), ids=CASES)
def test_counts(within, beyond, param, flag):
    check_counts(completion(**within), LIMITS)
    with pytest.raises(InvalidRequest, match=r"limit") as caught:
        check_counts(completion(**beyond), LIMITS)
    assert caught.value.param == param
    assert flag in str(caught.value)


def test_many_messages():
    check_counts(ChatCompletionRequest(messages=[HELLO] * 2), LIMITS)
    with pytest.raises(InvalidRequest, match=r"messages holds 3 entries, more than 2, the limit.*--max-messages"):
        check_counts(ChatCompletionRequest(messages=[HELLO] * 3), LIMITS)


@pytest.mark.parametrize("prompt", ["a" * 100, [1] * 100], ids=["text", "ids"])
def test_one_prompt_is_one_however_long(prompt):
    check_counts(completion(prompt=prompt), LIMITS)


@pytest.mark.parametrize(
    "body",
    [b"", b"[[[[]]]]", b'{"a": [{"b": [1]}]}', b"[]" * 20, b'"' + b"[" * 20 + b'"', b'["\\"[[[[[[", {}]', b"]]]]]]"],
)
def test_bodies_of_little_depth(body):
    check_depth(body, LIMITS)


@pytest.mark.parametrize("body", [b"[" * 5, b'{"a":' * 5000, b'["[[", [[[[1]]]]]', b'{"x": "\\\\", "y": [[[[1]]]]}'])
def test_bodies_too_deep(body):
    with pytest.raises(InvalidRequest, match=r"more than 4 levels deep, the limit.*--max-json-depth"):
        check_depth(body, LIMITS)


@pytest.mark.parametrize(
    "body", [b'"\\\\' * 400_000, b'"' * 1_000_001 + b"[" * 9, b'["' + b'\\"' * 400_000], ids=range(3)
)
def test_strings_that_never_end_take_no_time(body):
    check_depth(body, LIMITS)


def test_a_text_that_cannot_fit_is_refused_without_tokenising():
    check_fits("x" * 30, max_model_len=10, longest_token=3)
    with pytest.raises(ContextLengthExceeded, match="at least 11 input tokens"):
        check_fits("x" * 31, max_model_len=10, longest_token=3)


def test_a_text_too_long_to_tokenise():
    limits = RequestLimits(max_prompt_chars=10)
    check_chars("x" * 10, limits)
    with pytest.raises(InvalidRequest, match=r"has 11 characters, the limit is 10: .*--max-prompt-chars"):
        check_chars("x" * 11, limits)
