"""`Aware`: a policy with perfect knowledge of the present, for scale: not an optimum, as it decides one by one.

It reads the engines' own state with no delay, knows what steps cost, and counts what waits or is on its way. Each
request goes where its own first token comes soonest, equals to the one with the least to do.
"""

from collections import Counter

from router_sim.baselines import Random
from router_sim.site import BLOCK_SIZE, Asked, Site


class Aware(Random):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._to_prefill: list[dict[int, int]] = [{} for _ in site.replicas]
        self._coming: list[Counter[int]] = [Counter() for _ in site.replicas]

    def choose(self, asked: Asked) -> int:
        missing = [asked.num_tokens - self._found(asked, replica) for replica in range(self.site.size)]
        costs = [self._cost_s(replica, missing[replica]) for replica in range(self.site.size)]
        chosen = self.argmin(costs)
        self._to_prefill[chosen][asked.number] = missing[chosen]
        self._coming[chosen].update(asked.hashes)
        return chosen

    def first_byte(self, asked: Asked, replica: int, cached_tokens: int) -> None:
        self._forget(asked, replica)

    def ended(self, asked: Asked, replica: int, *, ok: bool) -> None:
        super().ended(asked, replica, ok=ok)
        self._forget(asked, replica)

    def _forget(self, asked: Asked, replica: int) -> None:
        if self._to_prefill[replica].pop(asked.number, None) is not None:
            self._coming[replica].subtract(asked.hashes)
            self._coming[replica] += Counter()

    def _found(self, asked: Asked, replica: int) -> int:
        known, coming = self.site.engines[replica].cached, self._coming[replica]
        blocks = 0
        for block_hash in asked.hashes:
            if block_hash not in known and block_hash not in coming:
                break
            blocks += 1
        return min(blocks * BLOCK_SIZE, asked.num_tokens - 1)

    def _cost_s(self, replica: int, missing: int) -> float:
        hardware, engine = self.site.hardware, self.site.engines[replica]
        tokens = missing + sum(self._to_prefill[replica].values())
        steps = -(-tokens // hardware.max_num_batched_tokens)
        wait_s = 0.0 if engine.is_idle else max(engine.ends_s - self.site.clock(), 0.0)
        over = max(self.in_flight[replica] + 1 - hardware.max_num_seqs, 0)  # each waits for somebody to end
        place_s = over * 64 * hardware.duration_s(0, hardware.max_num_seqs) / hardware.max_num_seqs
        return wait_s + steps * hardware.duration_s(0, engine.num_running) + tokens * hardware.prefill_token_s + place_s
