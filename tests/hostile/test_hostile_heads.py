"""Mutated heads on pipelined, kept-alive connections: each request is served by its framing, or refused.

LONG=1 sends 100000 heads instead of 20000. `-s` prints the figures of the run.
"""

import itertools
from collections import Counter

import pytest
from octavo_testing.framing_attacks import SMUGGLED
from octavo_testing.mutated_heads import HeadMutator
from octavo_testing.mutated_run import LAST, MutatedReport, send_mutated
from octavo_testing.raw_http import ask
from octavo_testing.run_length import LONG

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SEED = 20260714
NUM_HEADS = 100_000 if LONG else 20_000
#: Connections that are sent before memory is measured; a connection carries 2.5 heads on average.
WARM_UP = 1000
MOST_GROWTH_BYTES = 16 * 1024 * 1024


async def test_mutated_heads_forge_no_request_and_move_no_response(server):
    report = MutatedReport()
    connections = HeadMutator(SEED).connections(NUM_HEADS)
    await send_mutated(server.port, itertools.islice(connections, WARM_UP), report)
    before = server.rss_bytes
    await send_mutated(server.port, connections, report)
    growth = server.rss_bytes - before
    served = Counter(server.prompts())
    print(
        f"\nstatuses {dict(report.statuses.most_common())}, left open {report.num_unclosed}, "
        f"served {len(served)} prompts, memory {before / 2**20:.1f} MiB {growth / 2**20:+.1f} MiB"
    )

    assert [prompt for prompt in served if SMUGGLED in prompt] == []
    assert {prompt for prompt in served if prompt not in report.sent} <= {LAST, ""}
    assert [prompt for prompt, count in served.items() if count > 1 and prompt not in (LAST, "")] == []
    assert report.faults[:3] == []
    assert growth < MOST_GROWTH_BYTES
    assert (await ask(server.port, "still there")).status == 200
