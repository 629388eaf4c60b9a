"""What other routers decide by, in the terms of their documents and code (sources: benchmarks/routing-study/README.md).

Where theirs poll, they get each step's frame here; where theirs estimate tokens from characters, they get tokens.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from router_sim.baselines import Random
from router_sim.site import BLOCK_SIZE, Asked, Site


class SGLang(Random):
    """`cache_aware` with the defaults of its command: its own tree of what it sent where, until loads differ much."""

    threshold, balance_abs, balance_rel = 0.3, 64, 1.5

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._sent: dict[int, int] = {}  # block -> the replica that it went to last

    def choose(self, asked: Asked) -> int:
        replica = self._choose(asked)
        for block_hash in asked.hashes:
            self._sent[block_hash] = replica
        return replica

    def _choose(self, asked: Asked) -> int:
        least, most = min(self.in_flight), max(self.in_flight)
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return self.argmin([*map(float, self.in_flight)])
        matched, replica = 0, None
        for block_hash in asked.hashes:
            if block_hash not in self._sent:
                break
            matched, replica = matched + BLOCK_SIZE, self._sent[block_hash]
        if replica is not None and matched / asked.num_tokens > self.threshold:
            return replica
        return self.argmin([*map(float, self.in_flight)])


class LLMD(Random):
    """llm-d's default weights, queue 2, KV use 2, prefix 3, with the approximate index: blocks of 64 tokens, as it sent
    them, as many for each replica as fit there.
    """

    unit = 4

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._max_blocks = site.hardware.num_blocks // self.unit
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in site.replicas]

    def choose(self, asked: Asked) -> int:
        loads = [replica.load for replica in self.site.replicas]
        waiting = [load.waiting for load in loads]
        least, most = min(waiting), max(waiting)
        scores = []
        for load, prefix in zip(loads, self.prefixes(asked), strict=True):
            queue = (most - load.waiting) / (most - least) if most > least else 1.0
            used = 1 - (load.free_blocks + load.cached_blocks) / load.total_blocks
            scores.append(-(2 * queue + 2 * (1 - used) + 3 * prefix))
        replica = self.argmin(scores)
        sent = self._sent[replica]
        for block_hash in asked.hashes[self.unit - 1 :: self.unit]:
            sent[block_hash] = None
            sent.move_to_end(block_hash)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)
        return replica

    def prefixes(self, asked: Asked) -> list[float]:
        units = asked.hashes[self.unit - 1 :: self.unit]
        return [_leading(units, sent) / max(len(units), 1) for sent in self._sent]


class LLMDExact(LLMD):
    """The same weights with its exact index."""

    def prefixes(self, asked: Asked) -> list[float]:
        return [matched / asked.num_tokens for matched in self.site.matched_tokens(asked)]


class LoadAware(Random):
    """production-stack's `loadaware`: matched/prompt - (load - mean)/max(1, mean), with beta = 1."""

    def choose(self, asked: Asked) -> int:
        mean = sum(self.in_flight) / self.site.size
        matched = self.site.matched_tokens(asked)
        return self.argmin(
            [
                (load - mean) / max(1.0, mean) - found / asked.num_tokens
                for load, found in zip(self.in_flight, matched, strict=True)
            ]
        )


class Dynamo(Random):
    """Its default cost in blocks: prefill still to do with this prompt, less what is found, plus blocks in use.

    Shared blocks in use count once; a request's prefill counts until its first token.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._prefill_tokens: list[dict[int, int]] = [{} for _ in site.replicas]
        self._in_use: list[Counter[int]] = [Counter() for _ in site.replicas]

    def choose(self, asked: Asked) -> int:
        matched = self.site.matched_tokens(asked)
        costs = []
        for prefill, in_use, found in zip(self._prefill_tokens, self._in_use, matched, strict=True):
            new_blocks = sum(block_hash not in in_use for block_hash in asked.hashes)
            to_prefill = sum(prefill.values()) + asked.num_tokens - found
            costs.append(to_prefill / BLOCK_SIZE + len(in_use) + new_blocks)
        replica = self.argmin(costs)
        self._prefill_tokens[replica][asked.number] = asked.num_tokens - matched[replica]
        self._in_use[replica].update(asked.hashes)
        return replica

    def first_byte(self, asked: Asked, replica: int, cached_tokens: int) -> None:
        self._prefill_tokens[replica].pop(asked.number, None)

    def ended(self, asked: Asked, replica: int, *, ok: bool) -> None:
        super().ended(asked, replica, ok=ok)
        self._prefill_tokens[replica].pop(asked.number, None)
        in_use = self._in_use[replica]
        for block_hash in asked.hashes:
            in_use[block_hash] -= 1
            if not in_use[block_hash]:
                del in_use[block_hash]


def _leading(units: Sequence[int], known: OrderedDict[int, None]) -> int:
    for count, unit in enumerate(units):
        if unit not in known:
            return count
    return len(units)
