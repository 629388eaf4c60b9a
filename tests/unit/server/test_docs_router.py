"""Times and limits that the guides give for the router and the KV stream are those of the code."""

from pathlib import Path

import pytest
from octavo_server.config import HttpSettings, RequestLimits
from octavo_server.http import request_framing
from octavo_server.kv import frames, publisher
from octavo_server.router import app
from octavo_server.router.balance import breaker, lease, outliers
from octavo_server.router.fleet import fleet, model_names
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.observe import decision_log, state_stream
from octavo_server.router.observe.metrics import counters
from octavo_server.router.proxy import retries
from octavo_server.router.settings import ForwardLimits

DOCS = Path(__file__).parents[3] / "docs"
FOLLOW, FORWARD, HTTP = FollowSettings(), ForwardLimits(), HttpSettings()
SILENCE_S = FOLLOW.missed_heartbeats * publisher.HEARTBEAT_S
KIB, MIB = 1024, 1024 * 1024

PHRASES = {
    "router.md": [
        f"after {FOLLOW.missed_heartbeats} missed heartbeats ({SILENCE_S:g} s) nothing that it told is believed",
        f"After {FOLLOW.max_misses} misses in a row ({FOLLOW.answer_timeout_s:g} s each) it is sent nothing",
        f"a miss is no answer in {FOLLOW.answer_timeout_s:g} s, or a 5xx",
        f"error event (504) when they have been silent for {app.DEAD_STREAM_S:g} s",
        f"or hasn't answered for {model_names.MAX_AWAY_S:g} s",
        f"or some have for {fleet.FEW_S:g} s",
        f"at the next frame: a heartbeat at the latest, {publisher.HEARTBEAT_S:g} s",
        f"at first after {FOLLOW.least_wait_s:g} s",
        f"no requests for {FORWARD.breaker_open_s:g} s, then 2, 4, up to {breaker.MOST_OPEN_S:g}",
        f"1 + `--max-retries` ({FORWARD.max_retries}) attempts",
        f"a reserve of {retries.MAX_RETRIES}",
        f"ejected for {outliers.EJECTED_S:g} s, then 20, up to {outliers.MAX_EJECTED_S:g}",
        f"exceeds its peers' by {outliers.MIN_EXCESS:g}",
        f"counts as load for {lease.FAILED_LOAD_S:g} s",
        f"`--max-queued-reqs` of them ({FORWARD.max_queued_requests})",
        f"`--max-hold-time` seconds ({FORWARD.max_hold_s:g})",
        f"`--slow-client-timeout` ({HTTP.slow_client_timeout_s:g} s)",
        f"`--max-request-bytes` ({RequestLimits().max_request_bytes // MIB} MiB)",
        f"({decision_log.KEPT} are kept in each worker)",
        f"`model` takes at most {counters.MAX_VALUES} values",
        f"a head that goes on beyond {request_framing.MAX_HEAD_BYTES // KIB} KiB",
    ],
    "kv-stream.md": [
        f"heartbeats ({SILENCE_S:g} s) without a byte",
        f"`/health` fails {FOLLOW.max_misses} times in a row (no answer in {FOLLOW.answer_timeout_s:g} s, or a 5xx)",
        f"{FOLLOW.least_wait_s:g} s, later every {FOLLOW.most_wait_s:g} s at most",
        f"more than {publisher.MAX_BACKLOG_BYTES // MIB} MiB behind",
        f"at most {publisher.PART_HASHES} hashes of a tier",
        f"refuses one above {frames.MAX_FRAME_BYTES // KIB} KiB",
        f"`version` {frames.VERSION}",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("page", "phrase"), [(page, phrase) for page, said in PHRASES.items() for phrase in said])
def test_what_the_guide_says_is_so(page, phrase):
    assert phrase in " ".join((DOCS / page).read_text().split())


def test_the_times_of_the_state_stream():
    assert (state_stream.PERIOD_S, state_stream.HEARTBEAT_S) == (0.2, 1.0), (
        "docs/guide/router.md: five a second, a second"
    )
