"""Cost of a routing decision for a prompt with known hashes, in microseconds of CPU time: `pick` and `lease`.

Also measured is the cost of the frame in which the replica reports that request, and of a frame about a request of
another router. Prompts share all but their last block with the replicas' blocks ("warm"), or none ("cold"). Goals:
25 us for 450 tokens on 2 replicas, 500 us for 8192 tokens on 8.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path

import support_path  # noqa: F401  (makes octavo_testing importable)
from octavo_server.kv.frames import FrameReader, Step, write
from octavo_server.router.balance.picker import Picker
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.prompts.prompt import Prompt
from octavo_testing.router_replicas import FedReplica
from table import Samples, print_table, save_json

BLOCK = 16


def hashes(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


def prompts(shared: list[int], blocks: int, count: int, *, warm: bool) -> Iterator[Prompt]:
    for seed in range(count):
        own = hashes(seed + 1, 1 if warm else blocks)
        known = (*shared[: blocks - len(own)], *own)
        yield Prompt(num_tokens=BLOCK * blocks + 3, affinity=shared[0], hashes=known, block_size=BLOCK, is_exact=True)


class Bench:
    """Measures requests one by one, so that only the last block of each is new."""

    def __init__(self, replicas: int, tokens: int) -> None:
        self._shared = hashes(0, tokens // BLOCK)
        self._known = {*self._shared}
        index = PrefixIndex(max_entries=4_000_000)
        self._fed = [FedReplica(index, f"replica-{k}", device=self._shared) for k in range(replicas)]
        self._replicas = [fed.replica for fed in self._fed]
        self._reader = FrameReader()
        self._now = 0.0
        self._picker = Picker(index, clock=lambda: self._now)

    def measure(self, count: int, *, warm: bool) -> list[Samples]:
        """Measure decisions, the frames about their requests, and frames about other routers' requests."""
        made = prompts(self._shared, len(self._shared), 2 * count, warm=warm)
        gc.collect()
        took = [self._round(ours, theirs) for ours, theirs in zip(made, made, strict=True)]
        return [Samples(values) for values in zip(*took[count // 10 :], strict=True)]

    def _round(self, ours: Prompt, theirs: Prompt) -> tuple[float, float, float]:
        self._now += 0.01
        started = time.process_time_ns()
        ticket = self._picker.lease(self._picker.pick(ours, self._replicas), ours)
        decided_us = (time.process_time_ns() - started) / 1000
        ours_us = self._receive_step(ticket.decision.chosen, ours)
        theirs_us = self._receive_step(self._replicas[0], theirs)
        ticket.record_first_byte()
        ticket.release("ok")
        return decided_us, ours_us, theirs_us

    def _receive_step(self, replica: Replica, prompt: Prompt) -> float:
        fed = self._fed[self._replicas.index(replica)]
        data = write(fed.step(coming=[block for block in prompt.hashes if block not in self._known]))
        started = time.process_time_ns()
        for frame in self._reader.feed(data):
            assert isinstance(frame, Step)
            fed.receive(frame)
            self._picker.record_load(replica)
        return (time.process_time_ns() - started) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=2000, help="decisions of each case. Default: 2000")
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()
    cases = [(2, 450), (8, 450), (8, 8192), (32, 8192), (100, 450), (100, 8192)]
    samples = {
        f"{replicas} replicas, {tokens} tokens, {'warm' if warm else 'cold'}": Bench(replicas, tokens).measure(
            args.count, warm=warm
        )
        for warm in (True, False)
        for replicas, tokens in cases
    }
    header = ["", "pick and lease", "frame about ours", "about another's"]
    print_table("us of CPU: median [min, max]", header, [[name, *map(str, of)] for name, of in samples.items()])
    save_json(args.json, {name: dict(zip(header[1:], of, strict=True)) for name, of in samples.items()})


if __name__ == "__main__":
    main()
