"""Reasoning is separated from the answer, however the text is split and wherever the reasoning was opened."""

import pytest
from octavo_server.output_parsing.events import join_events, merge_adjacent
from octavo_server.output_parsing.output_parser import OutputParser, ReasoningTokens
from octavo_server.output_parsing.reasoning_formats import REASONING_PARSERS, ReasoningStart
from octavo_server.output_parsing.reasoning_parser import ReasoningParser
from octavo_server.output_parsing.tool_call_formats import HermesParser
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
def test_reasoning_is_separated_from_the_answer(is_open, answer, reasoning, text):
    joined = join_events(assert_same_for_all_splits(lambda: ReasoningParser(is_open=is_open), answer))
    assert (joined.reasoning, joined.text) == (reasoning, text)


def test_calls_are_parsed_only_after_reasoning():
    answer = '<think>\nI could <tool_call>{"name": "g"}.\n</think>\n\n<tool_call>{"name": "f"}</tool_call>\n'

    def new_parser():
        return OutputParser(reasoning=ReasoningParser(is_open=False), calls=HermesParser(numbered_ids()))

    for pieces in all_splits(answer):
        parser = new_parser()
        parts = [part for piece in pieces for part in parser.push(piece)]
        joined = join_events(merge_adjacent([*parts, *parser.finish()]))
        assert (joined.reasoning, joined.text) == ('I could <tool_call>{"name": "g"}.', None)
        assert [(call.name, call.arguments) for call in joined.calls] == [("f", "{}")]


OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "kwargs", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", "", {}, ReasoningStart(False)),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", {}, ReasoningStart(True)),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", {}, None),
        ("qwen3", "<|im_start|>assistant\n", "", OFF, None),
        ("deepseek_r1", "<|Assistant|>", "", {}, ReasoningStart(True)),
        ("deepseek_r1", "<|Assistant|><think>\n", "", OFF, ReasoningStart(True)),
        ("deepseek_r1", "<|Assistant|></think>", "", {}, None),
        ("qwen3", "say <think> please", "", {}, ReasoningStart(False)),
        ("qwen3", "x<think>Hm, so", "<think>Hm, so", {}, ReasoningStart(True)),
        ("qwen3", "x<think>Hm</think>I", "<think>Hm</think>I", {}, None),
    ],
)
def test_prompt_determines_whether_an_answer_starts_with_reasoning(name, prompt, continued, kwargs, expected):
    found = REASONING_PARSERS[name].reasoning_start(prompt, continued=continued, template_kwargs=kwargs)
    assert found == expected


@pytest.mark.parametrize(("is_open", "num"), [(True, 4), (False, 2)])
def test_tokens_between_the_markers_are_counted(is_open, num):
    tokens = ReasoningTokens(start_id=1, end_id=2, is_open=is_open)
    tokens.add([7, 7, 1, 5], began_as_reasoning=is_open)
    tokens.add([5, 2, 7, 1, 7], began_as_reasoning=True)
    assert tokens.num_tokens == num


def test_tokens_are_counted_per_chunk_without_token_markers():
    tokens = ReasoningTokens(start_id=None, end_id=None, is_open=True)
    tokens.add([7, 7], began_as_reasoning=True)
    tokens.add([7], began_as_reasoning=False)
    assert tokens.num_tokens == 2
