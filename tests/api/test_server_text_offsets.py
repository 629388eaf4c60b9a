"""`text_offset` of completions: each token's place in `text`, for parts of characters, echo, stops and streams."""

import codecs
import json
import random

import pytest
from octavo_testing.scripted import EOS, text_ids
from octavo_testing.server import events

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIECES = ["a", "Z", " ", "  ", "\n\n", "\t", "é", "ก็", "ภาษา", "日", "🤗", "👩‍👩‍👧", "\ufffd"]
STOPS = ["ab", "🤗", "ษา", " \n"]


def random_text(rng, most=12):
    return "".join(rng.choices(PIECES, k=rng.randint(1, most)))


def check_columns(text, columns):
    """Each token is a byte: its place is that of the character to which its byte belongs, or the text's end."""
    data, offsets = b"", columns["text_offset"]
    assert len({len(column) for column in columns.values()}) == 1
    assert offsets == sorted(offsets)
    for token, offset in zip(columns["tokens"], offsets, strict=True):
        if token == "<|endoftext|>":
            assert offset == min(len(codecs.utf_8_decode(data, "replace", False)[0]), len(text))
            continue
        if token.startswith("bytes:"):
            data += bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        else:
            assert text[offset:].startswith(token) or offset == len(text)
            data += token.encode()
        assert offset == min(len(data.decode(errors="replace")) - 1, len(text))


def joined(chunks, index):
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    names = choices[0]["logprobs"].keys()
    columns = {name: [entry for choice in choices for entry in choice["logprobs"][name]] for name in names}
    return "".join(choice["text"] for choice in choices), columns


@pytest.mark.parametrize("seed", range(8))
async def test_offsets_are_places_in_the_text_streamed_or_not(served, seed):
    rng = random.Random(seed)
    served.engine.replies = [random_text(rng) for _ in range(2)]
    if seed % 3 == 0:
        served.engine.replies[1] = [*rng.choices(range(128, 256), k=6), *text_ids("é ก"), 0xF0, 0x9F]
    served.engine.yield_at = frozenset(rng.sample(range(1, 200), k=120))
    body = {"prompt": random_text(rng), "n": 2, "max_tokens": 200, "logprobs": 2, "echo": bool(seed % 2)}
    if seed % 4:
        body |= {"stop": rng.sample(STOPS, k=2), "include_stop_str_in_output": seed % 4 == 1}
    whole = (await served.http.post("/v1/completions", json=body)).json()["choices"]
    streamed = await served.http.post("/v1/completions", json={**body, "stream": True})
    chunks = [json.loads(event) for event in events(streamed.text)[:-1]]
    for index, choice in enumerate(whole):
        assert joined(chunks, index) == (choice["text"], choice["logprobs"])
        columns, start = choice["logprobs"], len(body["prompt"]) if body["echo"] else 0
        num_prompt = len(text_ids(body["prompt"])) if body["echo"] else 0
        check_columns(body["prompt"], {name: column[:num_prompt] for name, column in columns.items()})
        generated = {name: column[num_prompt:] for name, column in columns.items()}
        generated["text_offset"] = [offset - start for offset in generated["text_offset"]]
        check_columns(choice["text"][start:], generated)


async def test_a_special_token_that_is_not_shown_has_no_length(served):
    served.engine.replies = [[*text_ids("é"), EOS + 1, *text_ids("b")]]
    for skips, expected in ((True, [0, 0, 1, 1, 2]), (False, [0, 0, 1, 13, 14])):
        body = {"prompt": "a", "logprobs": 0, "max_tokens": 9, "skip_special_tokens": skips}
        choice = (await served.http.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["logprobs"]["text_offset"] == expected


async def test_parts_of_characters_are_different_keys(served):
    served.engine.replies = ["🤗"]
    body = {"prompt": "a", "logprobs": 3, "max_tokens": 2}
    columns = (await served.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert columns["tokens"] == [r"bytes:\xf0", r"bytes:\x9f"]
    assert [*columns["top_logprobs"][0]] == [r"bytes:\xf0", r"bytes:\xf1", r"bytes:\xf2", r"bytes:\xf3"]
