"""Prompts below 250 tokens whose answers quote them."""

_TASKS = (
    "Repeat this text exactly",
    "Copy the following without changes",
    "Write this again, word by word",
    "Correct the typos in this text and return all of it",
)
_TEXTS = (
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    "    return area(width, height) * depth\n",
    '{"name": "lamp", "price": 12, "tags": ["light", "desk"], "stock": {"berlin": 4, "paris": 7}}',
    "The harbour master counted nine ships on Monday, eleven ships on Tuesday and four ships on Wednesday.",
    "SELECT name, price FROM products WHERE price > 10 AND stock > 0 ORDER BY price DESC LIMIT 20;",
    "- flour 200 g\n- sugar 100 g\n- butter 150 g\n- eggs 3\n- milk 50 ml\n- salt 1 pinch\n",
)

#: 20 chats of one message each.
COPY_CHATS = [[{"role": "user", "content": f"{task}:\n\n{text}"}] for text in _TEXTS for task in _TASKS]
