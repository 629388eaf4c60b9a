"""Dashboards and alerts query exposed series by existing labels; each alert has a remedy."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[3]
FILES = ROOT / "charts" / "octavo" / "files"
GUIDE = ROOT / "docs" / "guide" / "alerts.md"
AUTOSCALING = GUIDE.with_name("autoscaling.md")
LISTS = ("tests/api/metrics.txt", "tests/router/router_metrics.txt", "tests/unit/operator/operator_metrics.txt")
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
#: Labels that Prometheus adds by the PodMonitors.
OF_TARGETS = {"namespace", "pod", "container", "infsvc"}


def _exposed() -> dict[str, set[str]]:
    """Labels by the name of each series."""
    found = {}
    for line in "".join((ROOT / path).read_text() for path in LISTS).splitlines():
        name, kind, *more = line.split()
        labels = set(more[0].split(",")) if more and not re.match(r"[\d.+-]", more[0]) else set()
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name + ending: labels | ({"le"} if ending == "_bucket" else set()) for ending in endings}
    return found


EXPOSED = _exposed()


def _alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def _panels() -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", panel, target["expr"]


def _examples() -> Iterator[tuple[str, str]]:
    """The queries of the objects for KEDA and prometheus-adapter."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", AUTOSCALING.read_text(), re.MULTILINE | re.DOTALL)
    manifests = [yaml.safe_load(block) for block in blocks]
    for trigger in (trigger for m in manifests for trigger in m.get("spec", {}).get("triggers", ())):
        yield "KEDA", trigger["metadata"]["query"]
    for rule in (rule for m in manifests for rule in m.get("rules", {}).get("external", ())):
        series = rule["seriesQuery"].partition("{")[0]
        matchers = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'infsvc="a",namespace="b"')
        yield rule["name"]["as"], matchers.replace("<<.Series>>", series)
        yield rule["name"]["as"], rule["seriesQuery"]


EXAMPLES = [*_examples()]
QUERIES = (
    [(name, expr) for name, _, expr in _panels()] + [(rule["alert"], rule["expr"]) for rule in _alerts()] + EXAMPLES
)


@pytest.mark.parametrize(("name", "expr"), QUERIES, ids=[name for name, _ in QUERIES])
def test_a_query_uses_exposed_series_and_labels(name: str, expr: str) -> None:
    tree = promql_parser.parse(expr.replace("$__rate_interval", "5m"))
    asked: dict[str, set[str]] = {}
    grouped: set[str] = set()

    def look(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            asked.setdefault(node.name, set()).update(matcher.name for matcher in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)

    promql_parser.walk(tree, look)
    assert asked
    assert asked.keys() <= EXPOSED.keys()
    for series, labels in asked.items():
        assert labels | grouped <= EXPOSED[series] | OF_TARGETS, series


def test_a_query_with_a_wrong_name_fails() -> None:
    with pytest.raises(AssertionError):
        test_a_query_uses_exposed_series_and_labels("", "sum by (model) (vllm:num_requests_runing)")
    with pytest.raises(AssertionError):
        test_a_query_uses_exposed_series_and_labels("", "sum by (replica) (vllm:num_requests_running)")


@pytest.mark.parametrize("rule", _alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_has_a_remedy_in_the_guide(rule: dict[str, Any]) -> None:
    assert re.search(rf"^## {rule['alert']}$", GUIDE.read_text(), re.MULTILINE)
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/guide/alerts.md#{rule['alert'].lower()}"
    assert re.fullmatch(r"\d+m", rule["for"])
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    grouped = {name for names in re.findall(r"by \(([^)]*)\)", rule["expr"]) for name in names.split(", ")}
    assert named <= grouped, "a label that the expression drops is empty in the text"


def test_the_guide_has_exactly_these_alerts() -> None:
    documented = re.findall(r"^## (Octavo\w+)$", GUIDE.read_text(), re.MULTILINE)
    assert documented == [rule["alert"] for rule in _alerts()]


def test_the_autoscaling_guide_has_examples_for_keda_and_prometheus_adapter() -> None:
    assert Counter(name for name, _ in EXAMPLES) == {
        "KEDA": 2,
        "octavo_kv_used_replicas": 2,
        "octavo_waiting_requests": 2,
    }


def test_each_part_has_a_dashboard_with_described_panels() -> None:
    assert [path.stem for path in DASHBOARDS] == ["autoscaling", "engine", "operator", "router"]
    assert [name for name, panel, _ in _panels() if not (panel["description"] and panel["fieldConfig"])] == []
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
        assert len(set(places)) == len(places)
        assert len({p["id"] for p in board["panels"]}) == len(places)
        variables = {v["name"] for v in board["templating"]["list"]} | {"__rate_interval"}
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= variables
