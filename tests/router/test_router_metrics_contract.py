"""A router's `/metrics` compared with `router_metrics.txt`, as every change affects dashboards."""

import re
from collections import defaultdict

import pytest
from octavo_server.router.balance.decision import RUNGS
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.observe.metrics.catalogue import FAMILIES, PREFIX
from octavo_server.router.observe.report import Reporter, ReportQuery, Waiting, exposition
from octavo_server.router.observe.request_observer import RouterTelemetry
from octavo_testing.router_parts import PROMPT, decision, exact_replica


@pytest.fixture(scope="module")
def text():
    """Metrics of a router with samples of every family."""
    index, telemetry = PrefixIndex(max_entries=100), RouterTelemetry()
    replicas = [exact_replica(name, index) for name in "ab"]
    for rung in RUNGS:
        observer = telemetry.observe("r")
        observer.model = "tiny"
        observer.record_decision(PROMPT, decision(*replicas, rung=rung), 0.00001)
        observer.record_retry("connect")
        observer.record_decision(PROMPT, decision(*replicas, rung=rung), 0.00001)
        observer.record_first_byte(48 if rung == "exact" else 80)
        observer.record_end(200, "finished")
    telemetry.metrics.record_wait("sent", 0.1)
    reporter = Reporter(
        telemetry=telemetry,
        index=index,
        replicas=lambda: replicas,
        waiting=lambda: Waiting({"m": 1}, {"cold": 2}),
        clock=lambda: 0.0,
    )
    return exposition([reporter.report(ReportQuery("metrics"))])


def test_names_types_labels_and_buckets_equal_the_list(text, golden):
    golden("router_metrics.txt", "\n".join(families(text)) + "\n")


def families(text):
    """`name type label,label bound bound ...` for each family, in the order of exposure."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels, bounds = defaultdict(set), defaultdict(dict)
    for name, inside in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        family = next(f for f in (name, re.sub("_(bucket|count|sum)$", "", name)) if f in kinds)
        found = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', inside))
        labels[family] |= found.keys() - {"le"}
        if "le" in found:
            bounds[family][found["le"]] = None
    lines = ([name, kind, ",".join(sorted(labels[name])), *bounds[name]] for name, kind in kinds.items())
    return [" ".join(part for part in line if part) for line in lines]


def test_every_family_of_the_list_has_a_sample(text):
    shown = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    assert [f.name for f in FAMILIES if not any(name.startswith(PREFIX + f.name) for name in shown)] == []


def test_every_line_is_valid_prometheus_text(text):
    line = re.compile(r'# (HELP|TYPE) \S+ .+|\w+(\{(\w+="([^"\\\n]|\\.)*",?)*\})? [-+.\de]+(inf|nan)?')
    assert [found for found in text.splitlines() if not line.fullmatch(found)] == []
    kinds = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
