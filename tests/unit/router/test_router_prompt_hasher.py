"""Cost and caches of hashing prompts, and the estimates of unreadable bodies."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from octavo_engine.frontend.request_builder import Frontend
from octavo_engine.settings.config import EngineConfig
from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.hashing import block_hashes, root_hash
from octavo_server.kv.card import KVModelCard
from octavo_server.openai.rendering import RenderOptions, render_conversation
from octavo_server.router.prompts.prompt import estimate, kind_of_body
from octavo_server.router.prompts.prompt_hasher import PromptHasher, is_nondeterministic
from octavo_testing.chat_shapes import SPECIAL, TEMPLATES, TOKENIZERS

BLOCK = 16
ROOT = root_hash("weights", "float32", BLOCK)
SYSTEM = {"role": "system", "content": "You are a helpful assistant that answers briefly and well. " * 40}


class CountingTokenizer:
    """`num_chars`: number of tokenised characters."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.num_chars = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_each(self, texts, *, add_special_tokens=True):
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_each(texts, add_special_tokens=add_special_tokens)


def card_of(tokenizer, **fields):
    known = {"root": ROOT, "block_size": BLOCK, "max_model_len": 65536, "chat_template": TEMPLATES["chatml"]}
    return KVModelCard(models=("m",), tokenizer=tokenizer.to_json(), special_tokens=SPECIAL, **{**known, **fields})


def reader_with(max_bytes=1 << 22, tokenizer="byte level", **fields):
    tokenizer = CountingTokenizer(TOKENIZERS[tokenizer]())
    card = card_of(tokenizer, **fields)
    template = None if card.chat_template is None else ChatTemplate(card.chat_template, SPECIAL)
    return PromptHasher(card, tokenizer, template, max_bytes=max_bytes), tokenizer


def ask(text):
    return {"messages": [SYSTEM, {"role": "user", "content": text}]}


def test_only_the_last_message_behind_a_known_beginning_is_tokenised():
    reader, tokenizer = reader_with()
    for number in range(3):
        reader.hash_prompt("chat", ask(f"question {number}"), "")
    before = tokenizer.num_chars
    reader.hash_prompt("chat", ask("question 4"), "")
    assert tokenizer.num_chars - before < 64


def test_a_growing_conversation_costs_its_new_part():
    reader, tokenizer = reader_with()
    messages, new = [SYSTEM], []
    for turn in range(40):
        messages += [{"role": "user", "content": f"{turn} and a b? " * 20}]
        before = tokenizer.num_chars
        reader.hash_prompt("chat", {"messages": messages}, "")
        new.append(tokenizer.num_chars - before)
        messages += [{"role": "assistant", "content": f"{turn} a b. " * 20}]
    assert max(new[2:]) < 1500


def test_a_long_message_with_another_end_reuses_its_beginning():
    reader, tokenizer = reader_with()
    document = "word and more words of a b " * 2000
    for number in range(2):
        reader.hash_prompt("chat", ask(f"{document} question {number}"), "")
    before = tokenizer.num_chars
    reader.hash_prompt("chat", ask(f"{document} question 3"), "")
    assert tokenizer.num_chars - before < 1500


@pytest.mark.parametrize("tokenizer", ["byte level", "byte level, bos", "byte level, bos and eos"])
def test_a_longer_text_reuses_its_known_beginning(tokenizer):
    reader, counted = reader_with(tokenizer=tokenizer)
    text = "word and more words of a b " * 400
    for number in range(2):
        reader.hash_prompt("completion", {"prompt": f"{text} {number}"}, "")
    before = counted.num_chars
    reader.hash_prompt("completion", {"prompt": f"{text} and {text}"}, "")
    assert counted.num_chars - before < len(text) + 1500


def test_memory_is_bounded_and_a_flood_keeps_used_entries():
    reader, tokenizer = reader_with(max_bytes=1 << 20)
    for number in range(2):
        reader.hash_prompt("chat", ask(f"question {number}"), "")
    for number in range(50):
        reader.hash_prompt("chat", {"messages": [{"role": "user", "content": f"{number} a word of a b " * 4000}]}, "")
    assert reader._chains.num_bytes <= 1 << 20
    before = tokenizer.num_chars
    reader.hash_prompt("chat", ask("question 3"), "")
    assert tokenizer.num_chars - before < 64


def test_distinct_last_messages_add_no_entries():
    reader, _ = reader_with()
    for number in range(2):
        reader.hash_prompt("chat", ask(f"question {number}"), "")
    before = reader._chains.num_bytes
    for number in range(500):
        reader.hash_prompt("chat", ask(f"question {number}"), "")
    assert reader._chains.num_bytes == before


def test_threads_compute_equal_hashes():
    reader, _ = reader_with(max_bytes=1 << 18)
    bodies = [ask(f"{number % 7} a b " * (number % 50)) for number in range(200)]
    alone = [PromptHasher.from_card(reader.card).hash_prompt("chat", body, "") for body in bodies[:14]]
    with ThreadPoolExecutor(4) as pool:
        prompts = [*pool.map(lambda body: reader.hash_prompt("chat", body, ""), bodies)]
    assert [p.hashes for p in prompts[:14]] == [p.hashes for p in alone]


def test_equivalent_bodies_have_equal_hashes():
    reader, _ = reader_with()
    parts = [{"type": "text", "text": SYSTEM["content"]}, {"type": "text", "text": "x"}]
    as_parts = {"messages": [{"content": parts, "role": "user"}], "tools": None, "chat_template_kwargs": {}}
    as_text = {"messages": [{"role": "user", "content": SYSTEM["content"] + "\nx"}]}
    assert reader.hash_prompt("chat", as_parts, "").hashes == reader.hash_prompt("chat", as_text, "").hashes != ()
    responses = reader.hash_prompt("responses", {"input": SYSTEM["content"] + "\nx"}, "")
    assert responses.hashes == reader.hash_prompt("chat", as_text, "").hashes


def test_prompts_hold_output_limits_and_numbers():
    reader, _ = reader_with()
    prompt = reader.hash_prompt("chat", {**ask("a"), "max_completion_tokens": 7, "max_tokens": 9, "n": 3}, "")
    assert (prompt.max_tokens, prompt.num_outputs) == (7, 3)
    assert reader.hash_prompt("completion", {"prompt": "a"}, "").max_tokens == 16
    assert reader.hash_prompt("responses", {"input": "a", "max_output_tokens": 5}, "").max_tokens == 5
    assert reader.hash_prompt("chat", ask("a"), "").max_tokens is None
    senseless = reader.hash_prompt("chat", {**ask("a"), "max_tokens": 10**400, "n": 10**400}, "")
    assert (senseless.max_tokens, senseless.num_outputs) == (2**31 - 1, 1024)


@pytest.mark.parametrize("field", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_a_request_that_skips_the_cache_has_no_hashes(field):
    prompt = reader_with()[0].hash_prompt("chat", {**ask("a"), **field}, "")
    assert (prompt.is_exact, prompt.hashes) == (True, ())
    assert prompt.num_tokens > 100


def test_a_replica_without_a_prefix_cache_gets_no_hashes():
    prompt = reader_with(root=b"")[0].hash_prompt("chat", ask("a"), "")
    assert (prompt.is_exact, prompt.hashes) == (True, ())


UNREADABLE = {
    "nothing": ("chat", {}),
    "no list": ("chat", {"messages": {"role": "user"}}),
    "no messages": ("chat", {"messages": []}),
    "an image": ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    "ill-typed tools": ("chat", {**ask("a"), "tools": [{"type": "function"}]}),
    "arguments that are no JSON": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    ),
    "taken template arguments": ("chat", {**ask("a"), "chat_template_kwargs": {"messages": []}}),
    "a prompt that is a number": ("completion", {"prompt": 5}),
    "no prompt": ("completion", {"prompt": ""}),
    "tokens that can't be": ("completion", {"prompt": [1, -1]}),
    "tokens too large": ("completion", {"prompt": [2**33]}),
    "a lone surrogate": ("completion", {"prompt": "a\ud800"}),
    "an earlier response": ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    "too long": ("chat", ask("a" * 3_000_000)),
}


@pytest.mark.parametrize(("kind", "body"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_an_unreadable_body_is_estimated(kind, body):
    prompt = reader_with()[0].hash_prompt(kind, body, "")
    assert prompt == estimate(kind, body)
    assert (prompt.is_exact, prompt.hashes) == (False, ())
    assert prompt.num_tokens >= 1


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}{{ [1, 2] | random }}"])
def test_a_nondeterministic_template_is_estimated(template):
    reader, _ = reader_with(chat_template=template)
    assert not reader.hash_prompt("chat", ask("a"), "").is_exact
    assert reader.hash_prompt("completion", {"prompt": "a"}, "").is_exact


def test_questions_about_other_images_have_other_affinities():
    def turn(*urls):
        images = [{"type": "image_url", "image_url": url} for url in urls]
        return [{"role": "user", "content": [*images, {"type": "text", "text": "What is this?"}]}]

    def affinity(messages):
        return estimate("chat", {"messages": messages}).affinity

    cat, dog = "data:,Y2F0", {"url": "data:,ZG9n"}
    assert len({affinity(turn(cat)), affinity(turn(dog)), affinity(turn(cat, dog)), affinity(turn())}) == 4
    assert affinity(turn({"url": cat})) == affinity(turn(cat))
    more = [{"role": "assistant", "content": "A cat."}, *turn(dog)]
    assert affinity([*turn(cat), *more]) == affinity(turn(cat))


def test_turns_of_a_conversation_share_one_affinity():
    turn = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]}
    more = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    first = estimate("chat", turn).affinity
    assert estimate("chat", {"messages": turn["messages"] + more}).affinity == first
    assert estimate("chat", {"messages": [turn["messages"][0], more[1]]}).affinity != first
    assert estimate("chat", {**turn, "cache_salt": "s"}).affinity != first
    long = "x" * 1000
    assert estimate("completion", {"prompt": long + "a"}).affinity == estimate("completion", {"prompt": long}).affinity
    assert reader_with()[0].hash_prompt("chat", turn, "").affinity == first


def test_estimates_are_close_to_the_real_number():
    assert estimate("chat", ask("a")).num_tokens == pytest.approx(600, rel=0.1)
    assert estimate("completion", {"prompt": [[1, 2], [3]], "n": 2}).num_tokens == 3
    assert estimate("completion", {"prompt": [[1, 2], [3]], "n": 2}).num_outputs == 4
    assert estimate("chat", {"messages": [7, None], "n": "x"}).num_tokens == 1


@pytest.mark.real_model
def test_prompts_of_the_real_model_are_hashed():
    frontend = Frontend.load(EngineConfig())
    tokenizer, template = frontend.tokenizer, frontend.chat_template
    card = card_of(tokenizer, chat_template=template.source)
    reader = PromptHasher.from_card(KVModelCard(**{**{f: getattr(card, f) for f in card.__struct_fields__},
                                                 "special_tokens": template.special_tokens}))  # fmt: skip
    messages = [SYSTEM]
    for turn in range(12):
        said = f"Tell me  about {turn}\n\nthe café's 12345 ways, it's <|im_end|> what I'd like. "
        messages.append({"role": ("user", "assistant")[turn % 2], "content": said * (1 + turn % 5 * 12)})
        ids = tokenizer.encode(render_conversation(template, messages, RenderOptions()), add_special_tokens=False)
        expected = [int.from_bytes(block_hash[:8], "little") for block_hash in block_hashes(ROOT, ids, BLOCK)]
        prompt = reader.hash_prompt("chat", {"messages": messages}, "")
        assert (prompt.num_tokens, [*prompt.hashes]) == (len(ids), expected)


def test_nondeterministic_templates_are_detected():
    assert is_nondeterministic("{{ ['a', 'b'] | random }}")
    assert not is_nondeterministic(TEMPLATES["qwen"])


def test_a_template_that_cannot_be_compiled_is_an_error_of_the_card():
    deep = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    for fields in ({"chat_template": deep}, {"chat_template": "x", "tool_chat_template": deep}):
        with pytest.raises(InvalidRequest):
            PromptHasher.from_card(card_of(TOKENIZERS["byte level"](), **fields))
    with pytest.raises(InvalidRequest):
        is_nondeterministic(deep)


@pytest.mark.parametrize(
    ("body", "kind"),
    [({"messages": [], "prompt": "a"}, "chat"), ({"prompt": "a"}, "completion"), ({}, "completion")],
)
def test_the_shape_of_an_invocation_decides_its_kind(body, kind):
    assert kind_of_body("invocation", body) == kind
