"""Workloads: conversations whose prompts, answers and arrival times are fixed before a run.

A token is one byte, so that texts stay small. Answers are fixed, too: the next turn of a conversation then doesn't
depend on the policy, and all policies get the same requests. Conversations arrive as a Poisson process that began long
before time 0; earlier turns are left out, so that the load is steady from the start.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

Text = bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn is sent at `at_s` of its conversation, but not before `pause_s` after the preceding answer."""

    at_s: float
    prompt: Text
    answer: Text
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`after` is the request of the turn before, if that arrives within the simulated time."""

    number: int
    at_s: float
    prompt: Text
    answer: Text
    after: int | None
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`converse(rng, pieces)` makes the turns of one conversation; `pieces` are the texts that conversations share."""

    name: str
    description: str
    turns_per_conversation: float
    longest_s: float
    common: Callable[[Random, int], list[Text]]
    converse: Callable[[Random, list[Text]], list[Turn]]

    def requests(self, *, rate: float, count: int, replicas: int, seed: int) -> list[Request]:
        """Return about `count` requests at `rate` per second, in the order of their times."""
        rng = Random(f"{self.name} {seed}")
        pieces = self.common(rng, replicas)
        duration_s = count / rate
        found: list[tuple[float, int, Turn, int | None]] = []
        for start_s in _poisson(rng, rate / self.turns_per_conversation, -self.longest_s, duration_s):
            before = None
            for turn in self.converse(rng, pieces):
                if 0 <= start_s + turn.at_s < duration_s:
                    found.append((start_s + turn.at_s, len(found), turn, before))
                    before = len(found) - 1
        found.sort(key=lambda entry: entry[:2])
        number = {key: i for i, (_, key, _, _) in enumerate(found)}
        return [
            Request(
                number=i,
                at_s=at_s,
                prompt=turn.prompt,
                answer=turn.answer,
                after=None if before is None else number[before],
                pause_s=turn.pause_s,
            )
            for i, (at_s, _, turn, before) in enumerate(found)
        ]


def _poisson(rng: Random, rate: float, start_s: float, end_s: float) -> Iterator[float]:
    at_s = start_s + rng.expovariate(rate)
    while at_s < end_s:
        yield at_s
        at_s += rng.expovariate(rate)


def _text(rng: Random, low: int, high: int | None = None) -> Text:
    return rng.randbytes(rng.randint(low, high or low))


def _one(rng: Random, prompt: Text) -> list[Turn]:
    return [Turn(at_s=0.0, prompt=prompt, answer=_text(rng, 32, 96))]


def _nothing(rng: Random, replicas: int) -> list[Text]:
    return []


def _texts(length: int, each: float) -> Callable[[Random, int], list[Text]]:
    return lambda rng, replicas: [_text(rng, length) for _ in range(max(1, round(each * replicas)))]


def _popular(rng: Random, pieces: list[Text], exponent: float = 0.8) -> Text:
    """Return a piece by Zipf's law, from the inverse of its continuous form."""
    share = 1 - exponent
    rank = (1 + rng.random() * ((len(pieces) + 1) ** share - 1)) ** (1 / share)
    return pieces[min(int(rank), len(pieces)) - 1]


def _growing(
    rng: Random, text: Text, turns: int, *, asks: tuple[int, int], answers: tuple[int, int], pause: float
) -> list[Turn]:
    """Return turns whose prompts contain all earlier turns. Users and tools take `pause` seconds on average."""
    made, at_s = list[Turn](), 0.0
    for _ in range(turns):
        text += _text(rng, *asks)
        pause_s = rng.uniform(0.4, 1.6) * pause
        turn = Turn(at_s=at_s, prompt=text, answer=_text(rng, *answers), pause_s=pause_s if made else 0.0)
        made.append(turn)
        text += turn.answer
        at_s += pause_s + 0.04 * len(turn.answer)
    return made


def _chat(rng: Random, pieces: list[Text]) -> list[Turn]:
    start = _popular(rng, pieces)
    return _growing(rng, start, rng.randint(2, 10), asks=(30, 150), answers=(40, 120), pause=6.0)


def _agent(rng: Random, pieces: list[Text], exponent: float = 0.8) -> list[Turn]:
    start = _popular(rng, pieces, exponent) + _text(rng, 60, 200)
    return _growing(rng, start, rng.randint(4, 12), asks=(80, 400), answers=(16, 64), pause=1.0)


def agents(exponent: float) -> Callable[[Random, list[Text]], list[Turn]]:
    """Return conversations of agents whose system prompts follow Zipf's law with this exponent; 0 is even."""
    return lambda rng, pieces: _agent(rng, pieces, exponent)


def _hot(rng: Random, pieces: list[Text]) -> list[Turn]:
    prefix = pieces[0] if rng.random() < 0.8 else _text(rng, len(pieces[0]))
    return _one(rng, prefix + _text(rng, 40, 160))


def _siblings(rng: Random, pieces: list[Text]) -> list[Turn]:
    """Return eight concurrent requests with a common prefix, like samples for a best-of-n or branches of a search."""
    prompt = _text(rng, 600, 1400)
    return [
        Turn(at_s=rng.random() * 0.02, prompt=prompt + _text(rng, 10, 40), answer=_text(rng, 32, 96)) for _ in range(8)
    ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="shared",
            description="25 system prompts of 1024 tokens per replica, with unequal popularity; 64-256 own tokens each",
            turns_per_conversation=1,
            longest_s=0,
            common=_texts(1024, 25),
            converse=lambda rng, pieces: _one(rng, _popular(rng, pieces) + _text(rng, 64, 256)),
        ),
        Workload(
            name="chat",
            description="2-10 turns of 30-150 tokens in and 40-120 out, 6 s apart; 4 system prompts of 200 tokens",
            turns_per_conversation=6,
            longest_s=130,
            common=lambda rng, replicas: [_text(rng, 200) for _ in range(4)],
            converse=_chat,
        ),
        Workload(
            name="agents",
            description="4-12 steps, 80-400 tool tokens in, 16-64 out, 1 s apart; 10 system prompts of 1500 tokens",
            turns_per_conversation=8,
            longest_s=55,
            common=lambda rng, replicas: [_text(rng, 1500) for _ in range(10)],
            converse=_agent,
        ),
        Workload(
            name="unshared",
            description="200-1200 tokens that no other request sends",
            turns_per_conversation=1,
            longest_s=0,
            common=_nothing,
            converse=lambda rng, pieces: _one(rng, _text(rng, 200, 1200)),
        ),
        Workload(
            name="hot",
            description="four of five requests share their first 1500 tokens; the fifth has 1500 of its own",
            turns_per_conversation=1,
            longest_s=0,
            common=lambda rng, replicas: [_text(rng, 1500)],
            converse=_hot,
        ),
        Workload(
            name="siblings",
            description="groups of eight requests within 20 ms that share their first 600-1400 tokens",
            turns_per_conversation=8,
            longest_s=0.02,
            common=_nothing,
            converse=_siblings,
        ),
    )
}
assert math.isclose(sum(range(2, 11)) / 9, WORKLOADS["chat"].turns_per_conversation)
