"""`Octavo`: the router's production classes behind the simulator's interface."""

from octavo_server.router.balance.lease import Lease
from octavo_server.router.balance.picker import Picker
from octavo_server.router.prompts.prompt import Prompt

from router_sim.router_view import BLOCK_SIZE, PolicyRequest, RouterView

AFFINITY_BLOCKS = 16


class Octavo:
    def __init__(self, view: RouterView) -> None:
        self._view = view
        self._picker = Picker(view.index, clock=view.clock)
        self._number = {replica.name: i for i, replica in enumerate(view.replicas)}
        self._leases: dict[int, Lease] = {}

    def pick(self, request: PolicyRequest) -> int:
        prompt = Prompt(
            num_tokens=request.num_tokens,
            affinity=request.hashes[min(AFFINITY_BLOCKS, len(request.hashes)) - 1] if request.hashes else 1,
            hashes=request.hashes,
            block_size=BLOCK_SIZE,
            is_exact=True,
            max_tokens=request.max_tokens,
        )
        decision = self._picker.pick(prompt, [r for r in self._view.replicas if r.is_routable])
        self._leases[request.number] = self._picker.lease(decision, prompt)
        return self._number[decision.chosen.name]

    def expected_tokens(self, number: int) -> int:
        return self._leases[number].decision.expected_tokens

    def on_frame(self, replica: int) -> None:
        self._picker.record_load(self._view.replicas[replica])

    def on_first_byte(self, request: PolicyRequest, replica: int, cached_tokens: int) -> None:
        self._leases[request.number].record_first_byte()

    def on_end(self, request: PolicyRequest, replica: int, *, ok: bool) -> None:
        self._leases.pop(request.number).release("ok" if ok else "unknown")
