"""Prompts below 250 tokens that models continue by copying a part of them, and what a caller sees of the outputs."""

from typing import Any

from octavo_engine import RequestOutput

_FRAMES = (
    "Original:\n{}\n\nExact copy:\n",
    "Text:\n{}\n\nCopy of the text:\n",
    "Source:\n{}\n\nVerbatim copy:\n",
    "Input:\n{}\n\nOutput, equal to the input:\n",
)
_TEXTS = (
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    "    return area(width, height) * depth\n",
    '{"name": "lamp", "price": 12, "tags": ["light", "desk"], "stock": {"berlin": 4, "paris": 7}}',
    "The harbour master counted nine ships on Monday, eleven ships on Tuesday and four ships on Wednesday.",
    "SELECT name, price FROM products WHERE price > 10 AND stock > 0 ORDER BY price DESC LIMIT 20;",
    "- flour 200 g\n- sugar 100 g\n- butter 150 g\n- eggs 3\n- milk 50 ml\n- salt 1 pinch\n",
)

COPY_PROMPTS = [frame.format(text) for text in _TEXTS for frame in _FRAMES]


def outputs_of(requests: list[RequestOutput]) -> list[tuple[Any, ...]]:
    """Return ids, text, reasons and log-probabilities of all outputs."""
    outputs = [output for request in requests for output in request.outputs]
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in outputs]
