"""Mutated heads on pipelined, kept-alive connections: each request is served by its framing, or refused.

`make test TESTS=tests/hostile ARGS='--hostile-heads 100000 -s'` is the long run and prints its figures.
"""

import itertools
from collections import Counter

import pytest
from octavo_testing.framing_attacks import SMUGGLED
from octavo_testing.mutated_heads import HeadMutator
from octavo_testing.mutated_run import LAST, MutatedReport, send_mutated
from octavo_testing.raw_http import ask

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SEED = 20260714
#: Share of connections before memory is measured.
WARM_UP = 2000
MOST_GROWTH_BYTES = 16 * 1024 * 1024


@pytest.mark.timeout(3600)
async def test_mutated_heads_forge_no_request_and_move_no_response(server, request):
    num_heads, report = request.config.getoption("--hostile-heads"), MutatedReport()
    connections = HeadMutator(SEED).connections(num_heads)
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
