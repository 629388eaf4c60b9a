"""A process with many fake replicas: `python -m octavo_testing.fake_fleet --replicas 100 --rate 20`.

The process prints one line of JSON with the replicas' URLs. Each replica holds `--stored` blocks and publishes `--rate`
evenly spread steps per second, each of which stores and removes `--blocks` blocks. Commands arrive on standard input,
one per line (`FAULT REPLICA_IDX`, with FAULT one of lose, repeat, reorder, lie, restart, digest); the process prints
one line of JSON after each.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from octavo_engine.wire.kv_stream import numbers, roll
from octavo_server.kv.frames import Frame, Step

from octavo_testing.fake_replica import FakeReplica, Lose, Reorder, Repeat, Spoiler, lie

SPOILERS: dict[str, Callable[[], Spoiler]] = {"lose": Lose, "reorder": Reorder, "repeat": Repeat, "lie": lambda: lie}


class BusyReplica:
    """A replica with a fixed number of blocks, of which each step replaces the oldest."""

    def __init__(self, seed: int, *, stored: int, blocks: int, heartbeat_s: float) -> None:
        self.fake = FakeReplica(heartbeat_s=heartbeat_s)
        self._dice = random.Random(seed)
        self._blocks = blocks
        self._has: deque[bytes] = deque()
        self.spoiled_at: float | None = None
        for start in range(0, stored, 4096):
            self._store(min(4096, stored - start))

    @property
    def count(self) -> int:
        return sum(len(part) // 8 for part in self._has)

    def step(self) -> None:
        blocks = self._blocks
        oldest = self._has.popleft()
        gone, left = oldest[: 8 * blocks], oldest[8 * blocks :]
        if left:
            self._has.appendleft(left)
        new = self._dice.randbytes(len(gone))
        self._has.append(new)
        rolled = roll(0, "device", (*numbers(new), *numbers(gone)))
        backlog = self._dice.randrange(1000)
        self.fake.step_packed(new, gone, rolled, running=8, prefill_backlog_tokens=backlog, batched_tokens=64)

    async def inject_fault(self, kind: str) -> None:
        if kind == "restart":
            self.spoiled_at = time.monotonic()
            await self.fake.stop()
            self.fake.begin_epoch_with_blocks()
            await self.fake.start()
        else:
            self.fake.spoil = self._spoil_once(SPOILERS[kind]())

    def _spoil_once(self, spoiler: Spoiler) -> Spoiler:
        """Return a spoiler that applies `spoiler` once and records the time of the fault."""

        def spoil(frame: Step) -> Sequence[Frame]:
            sent = [*spoiler(frame)]
            if sent != [frame]:
                self.spoiled_at = self.spoiled_at or time.monotonic()
                if sent:
                    self.fake.spoil = None
            return sent

        self.spoiled_at = None
        return spoil

    def _store(self, count: int) -> None:
        part = self._dice.randbytes(8 * count)
        self._has.append(part)
        self.fake.step_packed(part, b"", roll(0, "device", numbers(part)))


async def run(args: argparse.Namespace) -> None:
    fleet = [
        BusyReplica(seed, stored=args.stored, blocks=args.blocks, heartbeat_s=args.heartbeat)
        for seed in range(args.replicas)
    ]
    for busy in fleet:
        await busy.fake.start()
    _print_json({"urls": [busy.fake.url for busy in fleet]})
    work = asyncio.create_task(_work(fleet, args.rate)) if args.rate else None
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).split():
        busy = fleet[int(line[1])]
        if line[0] != b"digest":
            await busy.inject_fault(line[0].decode())
        while busy.spoiled_at is None:
            await asyncio.sleep(0.001)
        _print_json({"at": busy.spoiled_at, "digest": busy.fake.digest, "count": busy.count})
    if work is not None:
        work.cancel()
    for busy in fleet:
        await busy.fake.stop()


async def _work(fleet: list[BusyReplica], rate: float) -> None:
    clock = asyncio.get_running_loop().time
    began, done = clock(), 0
    while True:
        due = int((clock() - began) * rate * len(fleet))
        for number in range(done, due):
            fleet[number % len(fleet)].step()
        done = due
        await asyncio.sleep(0.001)


def _print_json(content: object) -> None:
    print(json.dumps(content), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas. Default: 1")
    parser.add_argument("--rate", type=float, default=0.0, help="steps per second of each replica. Default: 0")
    parser.add_argument("--stored", type=int, default=1000, help="blocks of each replica. Default: 1000")
    parser.add_argument("--blocks", type=int, default=4, help="blocks that each step stores and removes. Default: 4")
    parser.add_argument("--heartbeat", type=float, default=0.5, help="seconds between heartbeats. Default: 0.5")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
