"""What a routing decision costs once the prompt's hashes are known: `pick` and `sent`, microseconds of CPU.

Prompts share all but their last block with what the replicas have ("warm"), or nothing ("cold"). Goals: 25 us for 450
tokens on 2 replicas, 500 us for 8192 tokens on 8.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path

import support_path  # noqa: F401  (makes octavo_testing importable)
from octavo_server.router.picker import Picker
from octavo_server.router.prefix_index import PrefixIndex
from octavo_server.router.prompt import Prompt
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


def measure(replicas: int, tokens: int, count: int, *, warm: bool) -> Samples:
    """Each request begins and ends before the next, so that only its own last block is new."""
    blocks = tokens // BLOCK
    shared = hashes(0, blocks)
    index = PrefixIndex(max_entries=4_000_000)
    fed = [FedReplica(index, f"replica-{k}", device=shared).replica for k in range(replicas)]
    now = 0.0
    picker = Picker(index, clock=lambda: now)
    took = []
    gc.collect()
    for prompt in prompts(shared, blocks, count, warm=warm):
        now += 0.01
        started = time.process_time_ns()
        ticket = picker.sent(picker.pick(prompt, fed), prompt)
        took.append((time.process_time_ns() - started) / 1000)
        ticket.first_byte(0)
        ticket.ended(ok=True)
    return Samples(tuple(took[count // 10 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="file to save all samples to")
    args = parser.parse_args()
    cases = [(2, 450), (8, 450), (8, 8192), (32, 8192), (100, 450), (100, 8192)]
    samples = {
        f"{replicas} replicas, {tokens} tokens, {'warm' if warm else 'cold'}": measure(
            replicas, tokens, args.count, warm=warm
        )
        for warm in (True, False)
        for replicas, tokens in cases
    }
    print_table("pick and sent, us of CPU: median [min, max]", ["", "us"], [[k, str(v)] for k, v in samples.items()])
    save_json(args.json, samples)


if __name__ == "__main__":
    main()
