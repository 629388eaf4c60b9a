"""`Octavo`: the router's own classes, as they run in production, behind the simulator's interface."""

from octavo_server.router.balance.lease import Lease
from octavo_server.router.balance.picker import Picker
from octavo_server.router.prompts.prompt import Prompt

from router_sim.site import BLOCK_SIZE, Asked, Site

AFFINITY_BLOCKS = 16


class Octavo:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._picker = Picker(site.index, clock=site.clock)
        self._number = {replica.name: i for i, replica in enumerate(site.replicas)}
        self._leases: dict[int, Lease] = {}

    def pick(self, asked: Asked) -> int:
        prompt = Prompt(
            num_tokens=asked.num_tokens,
            affinity=asked.hashes[min(AFFINITY_BLOCKS, len(asked.hashes)) - 1] if asked.hashes else 1,
            hashes=asked.hashes,
            block_size=BLOCK_SIZE,
            is_exact=True,
            max_tokens=asked.max_tokens,
        )
        decision = self._picker.pick(prompt, self._site.replicas)
        self._leases[asked.number] = self._picker.lease(decision, prompt)
        return self._number[decision.chosen.name]

    def expected_tokens(self, number: int) -> int:
        return self._leases[number].decision.expected_tokens

    def heard(self, replica: int) -> None:
        self._picker.record_load(self._site.replicas[replica])

    def first_byte(self, asked: Asked, replica: int, cached_tokens: int) -> None:
        self._leases[asked.number].record_first_byte()

    def ended(self, asked: Asked, replica: int, *, ok: bool) -> None:
        self._leases.pop(asked.number).release("ok" if ok else "unknown")
