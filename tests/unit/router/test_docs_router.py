"""The times and limits of docs/reference/router.md are those of the code: --update-golden writes the table.

The names of flags, metrics and headers in all pages exist in the code.
"""

import argparse
import re
from pathlib import Path

import pytest
from octavo_engine.wire.metrics import METRICS
from octavo_server.cli.main import build_parser
from octavo_server.config import HttpSettings, RequestLimits
from octavo_server.http import request_framing, router_secret
from octavo_server.kv import frames, publisher
from octavo_server.router import app
from octavo_server.router.balance import breaker, hot_prefix, lease, outliers, predictions, score
from octavo_server.router.fleet import fleet, model_names
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.observe import decision_log, state_stream
from octavo_server.router.observe.metrics import catalogue, counters
from octavo_server.router.proxy import retries
from octavo_server.router.settings import ForwardLimits

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "router.md"
BEGIN, END = "test_docs_router.py --update-golden -->\n", "<!-- end of limits -->"
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "renames.md")]
FOLLOW, FORWARD, HTTP, LIMITS = FollowSettings(), ForwardLimits(), HttpSettings(), RequestLimits()
KIB, MIB = 1024, 1024 * 1024

ROWS = {
    "heartbeat of a KV stream": f"{publisher.HEARTBEAT_S:g} s",
    "missed heartbeats until a stream is distrusted": f"{FOLLOW.missed_heartbeats}",
    "time for an answer to `/health`": f"{FOLLOW.answer_timeout_s:g} s",
    "missed health checks until a replica gets no requests": f"{FOLLOW.max_misses}",
    "silence after which streams of such a replica end": f"{app.DEAD_STREAM_S:g} s",
    "pause before a stream is opened again": f"{FOLLOW.least_wait_s:g} s, growing to {FOLLOW.most_wait_s:g} s",
    "largest frame of a KV stream": f"{frames.MAX_FRAME_BYTES // KIB} KiB",
    "attempts per request": f"1 + `--max-retries` ({FORWARD.max_retries})",
    "losses after which a request is not retried": f"{retries.MAX_LOST}",
    "retries of all requests": f"1 per {retries.REQUESTS_PER_RETRY} requests, and a reserve of {retries.MAX_RETRIES}",
    "failures in a row that open a breaker": f"{FORWARD.breaker_failures}",
    "open breaker": f"{FORWARD.breaker_open_s:g} s, doubling to {breaker.MOST_OPEN_S:g} s",
    "ejection of an outlier": f"{outliers.EJECTED_S:g} s, doubling to {outliers.MAX_EJECTED_S:g} s",
    "excess of its error share over its peers'": f"{outliers.MIN_EXCESS:g}",
    "a failed request counts as load": f"{lease.FAILED_LOAD_S:g} s",
    "requests in the queue": f"`--max-queued-reqs` ({FORWARD.max_queued_requests})",
    "wait for a first replica": f"`--max-hold-time` ({FORWARD.max_hold_s:g} s)",
    "a replica that reports no models delays the 404 of unknown names": f"{model_names.MAX_AWAY_S:g} s",
    "a known name outlives its last replica": f"{fleet.DEPARTED_S:g} s",
    "`/ready` with half of the replicas or fewer": f"after {fleet.FEW_S:g} s",
    "size of URL and headers": f"{request_framing.MAX_HEAD_BYTES // KIB} KiB",
    "size of a body": f"`--max-request-bytes` ({LIMITS.max_request_bytes // MIB} MiB)",
    "client that does not read": f"`--slow-client-timeout` ({HTTP.slow_client_timeout_s:g} s)",
    "decisions kept by each worker": f"{decision_log.KEPT}",
    "values of the metric label `model`": f"{counters.MAX_VALUES}",
    "period of changes in `/state/events`": f"{state_stream.PERIOD_S:g} s",
    "period of heartbeats in `/state/events`": f"{state_stream.HEARTBEAT_S:g} s",
    "predicted blocks": f"{predictions.MAX_BLOCKS}",
    "share of a block's prefill saved by a host copy": f"{score.HOST_SHARE:g}",
    "tie of costs": f"{score.TIE:.0%}",
    "tokens for copying hot prefixes, per cached token": f"{hot_prefix.EARNED:g}, at most {hot_prefix.MOST_TOKENS}",
}


def test_the_table_of_limits_is_that_of_the_code(golden):
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.partition(END)[2]
    table = "| limit | value |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in ROWS.items())
    golden(str(PAGE), f"{before}{BEGIN}{table}{END}{after}")


def test_the_kv_stream_page_gives_the_limits_of_the_code():
    text = " ".join((ROOT / "docs" / "reference" / "kv-stream.md").read_text().split())
    for number in (
        f"{publisher.MAX_BACKLOG_BYTES // MIB} MiB",
        f"{publisher.PART_HASHES} hashes",
        f"{frames.MAX_FRAME_BYTES // KIB} KiB",
        f"`version` {frames.VERSION}",
        f"({FOLLOW.missed_heartbeats * publisher.HEARTBEAT_S:g} s)",
        f"{FOLLOW.max_misses} times",
        f"{FOLLOW.answer_timeout_s:g} s",
        f"{FOLLOW.least_wait_s:g} s",
        f"{FOLLOW.most_wait_s:g} s",
    ):
        assert number in text


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(*map(flags_of, action.choices.values()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_a_page_exist(page):
    text = page.read_text()
    tokens = re.findall(r"`(--[a-z][a-z0-9-]+)", text)
    known = flags_of(build_parser()) | FOREIGN_FLAGS
    assert sorted(set(tokens) - known) == []
    series = set(re.findall(r"\boctavo_router_\w+", text))
    assert {name.removesuffix("_bucket") for name in series} <= {catalogue.PREFIX + f.name for f in catalogue.FAMILIES}
    exposed = {name.removesuffix("_total") for metric in METRICS for name in metric.exposed_names()}
    assert {name.removesuffix("_total") for name in re.findall(r"`((?:vllm|octavo):\w+)`", text)} <= exposed
    headers = {router_secret.SECRET_HEADER, router_secret.TENANT_HEADER, *RESPONSE_HEADERS}
    assert set(re.findall(r"\bx-octavo-[a-z-]*[a-z]\b", text)) <= headers


#: Flags of pytest, our own tests and benchmarks, Helm and kubectl that pages name.
FOREIGN_FLAGS = {"--set", "--reset-then-reuse-values", "--take-ownership", "--peers", "--update-golden"}
RESPONSE_HEADERS = {"x-octavo-replica", "x-octavo-rung", "x-octavo-cached-tokens"}
