"""The times and limits of docs/reference/router.md are those of the code: --update-golden writes the table.

The names of flags, metrics and headers in all pages exist in the code.
"""

import argparse
import re
from pathlib import Path

import pytest
from octavo_engine.wire.metrics import METRICS
from octavo_server.cli.main import build_parser
from octavo_server.http import router_secret
from octavo_server.kv import frames, publisher
from octavo_server.router import app
from octavo_server.router.balance import lease, outliers, predictions
from octavo_server.router.fleet import fleet, model_names
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.observe import decision_log, state_stream
from octavo_server.router.observe.metrics import catalogue, counters
from octavo_server.router.proxy import retries

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "router.md"
BEGIN, END = "test_docs_router.py --update-golden -->\n", "<!-- end of limits -->"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLLOW = FollowSettings()
KIB, MIB = 1024, 1024 * 1024

ROWS = {
    "silence that ends a stream of a replica whose health checks fail": f"{app.DEAD_STREAM_S:g} s",
    "replicas lost by one request until it is not retried": f"{retries.MAX_LOST}",
    "retries of all requests": f"1 per {retries.REQUESTS_PER_RETRY} requests, and a reserve of {retries.MAX_RETRIES}",
    "ejection of a replica": f"{outliers.EJECTED_S:g} s, doubling to {outliers.MAX_EJECTED_S:g} s",
    "excess of a replica's error share over its peers' that ejects it": f"{outliers.MIN_EXCESS:g}",
    "time that a failed request counts as load of its replica": f"{lease.FAILED_LOAD_S:g} s",
    "time that a replica without reported models delays the 404 of other models": f"{model_names.MAX_AWAY_S:g} s",
    "time that a model name stays known after its last replica left": f"{fleet.DEPARTED_S:g} s",
    "wait of `/ready` if half of the replicas or fewer can receive requests": f"{fleet.FEW_S:g} s",
    "decisions kept by each worker": f"{decision_log.KEPT}",
    "values of the metric label `model`": f"{counters.MAX_VALUES}",
    "period of changes in `/state/events`": f"{state_stream.PERIOD_S:g} s",
    "least distance of urgent changes in `/state/events`": f"{state_stream.LEAST_DISTANCE_S:g} s",
    "period of heartbeats in `/state/events`": f"{state_stream.HEARTBEAT_S:g} s",
    "maximum of predicted blocks": f"{predictions.MAX_BLOCKS}",
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
    requests = {value for name, value in vars(router_secret).items() if name.endswith("_HEADER")}
    headers = {*requests, *RESPONSE_HEADERS}
    assert set(re.findall(r"\bx-octavo-[a-z-]*[a-z]\b", text)) <= headers


#: Flags of pytest, our own tests and benchmarks, Helm and kubectl that pages name.
FOREIGN_FLAGS = {
    "--only",
    "--present",
    "--work",
    "--set",
    "--extra-index-url",
    "--reset-then-reuse-values",
    "--take-ownership",
    "--peers",
    "--update-golden",
}
RESPONSE_HEADERS = {"x-octavo-replica", "x-octavo-rung", "x-octavo-cached-tokens"}
