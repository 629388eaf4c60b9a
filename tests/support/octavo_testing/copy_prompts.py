"""Prompts below 250 tokens that models continue by copying a part of them."""

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
