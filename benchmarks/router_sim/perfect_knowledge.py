"""`PerfectKnowledge`: a reference policy that sees the present state of every engine.

It reads engine state without delay, knows the cost of each step, and counts waiting and travelling requests. It sends
each request to the replica with the earliest first token for that request, and breaks ties at random. It is not an
optimum, because it places requests one by one.
"""

from collections import Counter

from router_sim.baselines import Random
from router_sim.router_view import BLOCK_SIZE, PolicyRequest, RouterView


class PerfectKnowledge(Random):
    def __init__(self, view: RouterView) -> None:
        super().__init__(view)
        self._to_prefill: list[dict[int, int]] = [{} for _ in view.replicas]
        self._coming: list[Counter[int]] = [Counter() for _ in view.replicas]

    def choose(self, request: PolicyRequest) -> int:
        missing = [request.num_tokens - self._found(request, replica) for replica in range(self.view.size)]
        costs = [self._cost_s(replica, missing[replica]) for replica in range(self.view.size)]
        chosen = self.argmin(costs)
        self._to_prefill[chosen][request.number] = missing[chosen]
        self._coming[chosen].update(request.hashes)
        return chosen

    def on_first_byte(self, request: PolicyRequest, replica: int, cached_tokens: int) -> None:
        self._forget(request, replica)

    def on_end(self, request: PolicyRequest, replica: int, *, ok: bool) -> None:
        super().on_end(request, replica, ok=ok)
        self._forget(request, replica)

    def _forget(self, request: PolicyRequest, replica: int) -> None:
        if self._to_prefill[replica].pop(request.number, None) is not None:
            self._coming[replica].subtract(request.hashes)
            self._coming[replica] += Counter()

    def _found(self, request: PolicyRequest, replica: int) -> int:
        known, coming = self.view.engines[replica].cached, self._coming[replica]
        blocks = 0
        for block_hash in request.hashes:
            if block_hash not in known and block_hash not in coming:
                break
            blocks += 1
        return min(blocks * BLOCK_SIZE, request.num_tokens - 1)

    def _cost_s(self, replica: int, missing: int) -> float:
        hardware, engine = self.view.hardware, self.view.engines[replica]
        tokens = missing + sum(self._to_prefill[replica].values())
        steps = -(-tokens // hardware.max_num_batched_tokens)
        wait_s = 0.0 if engine.is_idle else max(engine.ends_s - self.view.clock(), 0.0)
        over = max(self.in_flight[replica] + 1 - hardware.max_num_seqs, 0)  # each waits for another sequence to end
        place_s = over * 64 * hardware.duration_s(0, hardware.max_num_seqs) / hardware.max_num_seqs
        return wait_s + steps * hardware.duration_s(0, engine.num_running) + tokens * hardware.prefill_token_s + place_s
