"""Reasoning is told apart from the answer, however the text is cut and wherever the reasoning was opened."""

import pytest
from octavo_server.answers.reader import AnswerReader
from octavo_server.reading.parts import join, merge
from octavo_server.reasoning.registry import REASONING_PARSERS, Thinking
from octavo_server.reasoning.think import ThinkReader
from octavo_server.reasoning.tokens import ReasoningTokens
from octavo_server.tools.hermes import HermesReader
from octavo_testing.parsing import all_splits, assert_same_for_all_splits, numbered_ids

OPEN, NOT_OPEN = True, False


@pytest.mark.parametrize(
    ("is_open", "answer", "reasoning", "text"),
    [
        (NOT_OPEN, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
        (NOT_OPEN, "\n <think>Hm.</think>Yes", "Hm.", "Yes"),
        (NOT_OPEN, "\nYes, <think> is a tag.", None, "\nYes, <think> is a tag."),
        (NOT_OPEN, "<thin", None, "<thin"),
        (NOT_OPEN, "<think>\n\n</think>\n\nYes", None, "Yes"),
        (NOT_OPEN, "<think>Hm", "Hm", None),
        (OPEN, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (OPEN, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (OPEN, "Hm. </thin", "Hm. </thin", None),
        (OPEN, "</think>Yes.", None, "Yes."),
        (OPEN, "Hm.</think> </think> <think>", "Hm.", " </think> <think>"),
        (OPEN, "", None, None),
    ],
)
def test_reasoning_and_answer(is_open, answer, reasoning, text):
    joined = join(assert_same_for_all_splits(lambda: ThinkReader(is_open=is_open), answer))
    assert (joined.reasoning, joined.text) == (reasoning, text)


def test_calls_stand_after_reasoning_only():
    answer = '<think>\nI could <tool_call>{"name": "g"}.\n</think>\n\n<tool_call>{"name": "f"}</tool_call>\n'

    def reader():
        return AnswerReader(thinking=ThinkReader(is_open=False), calls=HermesReader(numbered_ids()))

    for pieces in all_splits(answer):
        one = reader()
        parts = [part for piece in pieces for part in one.push(piece)]
        joined = join(merge([*parts, *one.finish()]))
        assert (joined.reasoning, joined.text) == ('I could <tool_call>{"name": "g"}.', None)
        assert [(call.name, call.arguments) for call in joined.calls] == [("f", "{}")]


OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "kwargs", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", "", {}, Thinking(False)),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", {}, Thinking(True)),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", {}, None),
        ("qwen3", "<|im_start|>assistant\n", "", OFF, None),
        ("deepseek_r1", "<|Assistant|>", "", {}, Thinking(True)),
        ("deepseek_r1", "<|Assistant|><think>\n", "", OFF, Thinking(True)),
        ("deepseek_r1", "<|Assistant|></think>", "", {}, None),
        ("qwen3", "say <think> please", "", {}, Thinking(False)),
        ("qwen3", "x<think>Hm, so", "<think>Hm, so", {}, Thinking(True)),
        ("qwen3", "x<think>Hm</think>I", "<think>Hm</think>I", {}, None),
    ],
)
def test_the_prompt_says_whether_an_answer_begins_with_reasoning(name, prompt, continued, kwargs, expected):
    found = REASONING_PARSERS[name].thinking(prompt, continued=continued, template_kwargs=kwargs)
    assert found == expected


@pytest.mark.parametrize(("is_open", "num"), [(True, 4), (False, 2)])
def test_tokens_between_the_markers_are_counted(is_open, num):
    tokens = ReasoningTokens(start_id=1, end_id=2, is_open=is_open)
    tokens.add([7, 7, 1, 5], began_as_reasoning=is_open)
    tokens.add([5, 2, 7, 1, 7], began_as_reasoning=True)
    assert tokens.num_tokens == num


def test_tokens_of_pieces_are_counted_where_markers_are_no_tokens():
    tokens = ReasoningTokens(start_id=None, end_id=None, is_open=True)
    tokens.add([7, 7], began_as_reasoning=True)
    tokens.add([7], began_as_reasoning=False)
    assert tokens.num_tokens == 2
