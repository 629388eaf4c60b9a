"""Time that a router takes to hash a prompt, in microseconds: from the request's body to its block hashes.

`tokenising` is the tokenizer's part of the time; `decision` is the rest, with the choice among eight replicas;
`afterwards` is the work after the request was sent, the prediction of its blocks. Garbage is collected as in
`octavo route`. Goals: 60 us to read 450 tokens of which only the last message is new, and 1 ms for the decision on 8192
new tokens.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import support_path  # noqa: F401  (makes octavo_testing importable)
from octavo_engine.frontend.request_builder import Frontend
from octavo_engine.settings.config import EngineConfig
from octavo_engine.text.template import ChatTemplate
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.hashing import root_hash
from octavo_server.cli.route import freeze_gc
from octavo_server.kv.card import KVModelCard
from octavo_server.router.balance.picker import Picker
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.prompts.prompt_hasher import PromptHasher
from octavo_testing.router_replicas import FedReplica
from table import Samples, print_table, save_json

BLOCK = 16
REPLICAS = 8
SHOWN = ("tokens", "read", "tokenising", "decision", "afterwards")
SYSTEM = {"role": "system", "content": "You are a helpful assistant that answers briefly and well. " * 40}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
SENTENCE = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will more no if out so said what up its about"
)
WORDS = SENTENCE.split()

Body = dict[str, Any]


class TimedTokenizer:
    """A tokenizer that adds up the microseconds of its calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.took_us = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_each(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        started = time.perf_counter_ns()
        ids = self._tokenizer.encode_each(texts, add_special_tokens=add_special_tokens)
        self.took_us += (time.perf_counter_ns() - started) / 1000
        return ids


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words)) + "."


def user(content: str) -> Body:
    return {"role": "user", "content": content}


def known_system(draw: random.Random) -> Iterator[Body]:
    """Yield bodies of 450 tokens, like those of `router_latency.py`."""
    while True:
        yield {"messages": [SYSTEM, user(f"question {draw.randrange(10**6)}")], "max_tokens": 8}


def all_new(draw: random.Random) -> Iterator[Body]:
    while True:
        yield {"messages": [{"role": "system", "content": text(draw, 4100)}, user(text(draw, 4050))]}


def known_document(draw: random.Random) -> Iterator[Body]:
    document = text(draw, 8100)
    while True:
        yield {"messages": [user(f"{document} question {draw.randrange(10**6)}")]}


def growing(draw: random.Random) -> Iterator[Body]:
    """Yield the turns of conversations that grow to 100 messages of some 80 tokens."""
    while True:
        messages = [SYSTEM]
        for _ in range(50):
            messages = [*messages, user(text(draw, 80))]
            yield {"messages": messages}
            messages = [*messages, {"role": "assistant", "content": text(draw, 80)}]


def agent(draw: random.Random) -> Iterator[Body]:
    """Yield the requests of an agent with tools; each extends the one before, up to 40 messages."""
    while True:
        messages: list[Body] = [SYSTEM, user(text(draw, 40))]
        for number in range(20):
            function = {"name": "look_up", "arguments": f'{{"word": "{draw.choice(WORDS)}"}}'}
            call = {"id": f"call{number}", "type": "function", "function": function}
            called = {"role": "assistant", "content": None, "tool_calls": [call]}
            messages = [*messages, called, {"role": "tool", "tool_call_id": call["id"], "content": text(draw, 60)}]
            yield {"messages": messages, "tools": [TOOL]}


CASES = {
    "450 tokens, all but the last message known": known_system,
    "8192 tokens, nothing known": all_new,
    "8192 tokens in one message, known but for its end": known_document,
    "a conversation that grows to 100 messages": growing,
    "an agent with tools, to 40 messages": agent,
}


def measure(card: KVModelCard, tokenizer: TimedTokenizer, bodies: Iterator[Body], count: int) -> dict[str, Samples]:
    template = ChatTemplate(card.chat_template or "", card.special_tokens)
    reader = PromptHasher(card, tokenizer, template)  # type: ignore[arg-type]
    index = PrefixIndex(max_entries=4_000_000)
    replicas = [FedReplica(index, f"replica-{k}", device=[]).replica for k in range(REPLICAS)]
    now = 0.0
    late: list[Callable[[], None]] = []
    picker = Picker(index, clock=lambda: now, call_soon=late.append)
    found: dict[str, list[float]] = {name: [] for name in SHOWN}
    freeze_gc()
    for _ in range(count):
        body = msgspec.json.decode(msgspec.json.encode(next(bodies)))
        now, tokenizer.took_us = now + 0.01, 0.0
        started = time.perf_counter_ns()
        prompt = reader.hash_prompt("chat", body, "")
        read = time.perf_counter_ns()
        ticket = picker.lease(picker.pick(prompt, replicas), prompt)
        picked = time.perf_counter_ns()
        while late:
            late.pop()()
        settled = time.perf_counter_ns()
        ticket.record_first_byte()
        ticket.release("ok")
        assert prompt.is_exact
        found["read"].append((read - started) / 1000)
        found["tokenising"].append(tokenizer.took_us)
        found["decision"].append((picked - started) / 1000 - tokenizer.took_us)
        found["afterwards"].append((settled - picked) / 1000)
        found["tokens"].append(prompt.num_tokens)
    return {name: Samples(tuple(values[count // 10 :])) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=EngineConfig().model, help="model of the tokenizer and chat template")
    parser.add_argument("--count", type=int, default=1000, help="requests of each case. Default: 1000")
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()
    frontend = Frontend.load(EngineConfig(model=args.model))
    tokenizer, template = TimedTokenizer(frontend.tokenizer), frontend.chat_template
    assert template is not None, "the model has no chat template"
    card = KVModelCard(
        models=("m",),
        root=root_hash("weights", "float32", BLOCK),
        block_size=BLOCK,
        max_model_len=131072,
        tokenizer=tokenizer.to_json(),
        chat_template=template.source,
        special_tokens=template.special_tokens,
    )
    samples = {name: measure(card, tokenizer, case(random.Random(1)), args.count) for name, case in CASES.items()}
    rows = [[name, *(str(found[column]) for column in SHOWN)] for name, found in samples.items()]
    print_table("us: median [min, max]", ["", *SHOWN], rows)
    save_json(args.json, samples)


if __name__ == "__main__":
    main()
