"""Policies of other routers, after their documents and code (sources: benchmarks/routing-study/README.md).

Routers that poll in reality get a frame of each step here; routers that estimate tokens from characters get tokens.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from router_sim.baselines import Random
from router_sim.router_view import BLOCK_SIZE, PolicyRequest, RouterView


class SGLang(Random):
    """`cache_aware` with its default settings: a tree of the prompts sent to each replica, until loads differ much."""

    threshold, balance_abs, balance_rel = 0.3, 64, 1.5

    def __init__(self, view: RouterView) -> None:
        super().__init__(view)
        self._sent: dict[int, int] = {}  # block -> replica that it was last sent to

    def choose(self, request: PolicyRequest) -> int:
        replica = self._choose(request)
        for block_hash in request.hashes:
            self._sent[block_hash] = replica
        return replica

    def _choose(self, request: PolicyRequest) -> int:
        least, most = min(self.in_flight), max(self.in_flight)
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return self.argmin([*map(float, self.in_flight)])
        matched, replica = 0, None
        for block_hash in request.hashes:
            if block_hash not in self._sent:
                break
            matched, replica = matched + BLOCK_SIZE, self._sent[block_hash]
        if replica is not None and matched / request.num_tokens > self.threshold:
            return replica
        return self.argmin([*map(float, self.in_flight)])


class LLMD(Random):
    """llm-d with its default weights (queue 2, KV use 2, prefix 3) and its approximate index.

    The index has the sent blocks of 64 tokens, for each replica as many as fit into its KV cache.
    """

    unit = 4

    def __init__(self, view: RouterView) -> None:
        super().__init__(view)
        self._max_blocks = view.hardware.num_blocks // self.unit
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in view.replicas]

    def choose(self, request: PolicyRequest) -> int:
        loads = [replica.load for replica in self.view.replicas]
        waiting = [load.waiting for load in loads]
        least, most = min(waiting), max(waiting)
        scores = []
        for load, prefix in zip(loads, self.prefixes(request), strict=True):
            queue = (most - load.waiting) / (most - least) if most > least else 1.0
            used = 1 - (load.free_blocks + load.cached_blocks) / load.total_blocks
            scores.append(-(2 * queue + 2 * (1 - used) + 3 * prefix))
        replica = self.argmin(scores)
        sent = self._sent[replica]
        for block_hash in request.hashes[self.unit - 1 :: self.unit]:
            sent[block_hash] = None
            sent.move_to_end(block_hash)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)
        return replica

    def prefixes(self, request: PolicyRequest) -> list[float]:
        units = request.hashes[self.unit - 1 :: self.unit]
        return [_leading(units, sent) / max(len(units), 1) for sent in self._sent]


class LLMDExact(LLMD):
    """llm-d with the same weights and its exact index."""

    def prefixes(self, request: PolicyRequest) -> list[float]:
        return [matched / request.num_tokens for matched in self.view.matched_tokens(request)]


class LoadAware(Random):
    """production-stack's `loadaware` with beta = 1: the score is matched/prompt - (load - mean)/max(1, mean)."""

    def choose(self, request: PolicyRequest) -> int:
        mean = sum(self.in_flight) / self.view.size
        matched = self.view.matched_tokens(request)
        return self.argmin(
            [
                (load - mean) / max(1.0, mean) - found / request.num_tokens
                for load, found in zip(self.in_flight, matched, strict=True)
            ]
        )


class Dynamo(Random):
    """Dynamo's default cost in blocks: pending prefill with this prompt, minus cached blocks, plus blocks in use.

    A shared block in use counts once; the prefill of a request counts until its first token.
    """

    def __init__(self, view: RouterView) -> None:
        super().__init__(view)
        self._prefill_tokens: list[dict[int, int]] = [{} for _ in view.replicas]
        self._in_use: list[Counter[int]] = [Counter() for _ in view.replicas]

    def choose(self, request: PolicyRequest) -> int:
        matched = self.view.matched_tokens(request)
        costs = []
        for prefill, in_use, found in zip(self._prefill_tokens, self._in_use, matched, strict=True):
            new_blocks = sum(block_hash not in in_use for block_hash in request.hashes)
            to_prefill = sum(prefill.values()) + request.num_tokens - found
            costs.append(to_prefill / BLOCK_SIZE + len(in_use) + new_blocks)
        replica = self.argmin(costs)
        self._prefill_tokens[replica][request.number] = request.num_tokens - matched[replica]
        self._in_use[replica].update(request.hashes)
        return replica

    def on_first_byte(self, request: PolicyRequest, replica: int, cached_tokens: int) -> None:
        self._prefill_tokens[replica].pop(request.number, None)

    def on_end(self, request: PolicyRequest, replica: int, *, ok: bool) -> None:
        super().on_end(request, replica, ok=ok)
        self._prefill_tokens[replica].pop(request.number, None)
        in_use = self._in_use[replica]
        for block_hash in request.hashes:
            in_use[block_hash] -= 1
            if not in_use[block_hash]:
                del in_use[block_hash]


def _leading(units: Sequence[int], known: OrderedDict[int, None]) -> int:
    for count, unit in enumerate(units):
        if unit not in known:
            return count
    return len(units)
