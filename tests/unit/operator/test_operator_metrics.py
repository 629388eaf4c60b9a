"""The operator's metrics match `operator_metrics.txt`: a change of the list affects every dashboard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from octavo_operator.cluster.client import ApiError
from octavo_operator.health import Liveness, serve_health
from octavo_operator.metrics import AutoscalingRow, Telemetry
from octavo_operator.plan.actions import Apply, CreateOnce, Delete, SetGate
from octavo_testing.serve_command import free_port
from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
READY = {"type": "Ready", "status": "True", "reason": "Serving"}
SERVICES: list[dict[str, Any]] = [
    {"metadata": {"namespace": "a", "name": "new"}},
    {"metadata": {"namespace": "a", "name": "good"}, "status": {"conditions": [READY]}},
    {
        "metadata": {"namespace": "b", "name": "good"},
        "status": {"conditions": [READY], "startup": {"pod": "p", "totalSeconds": 9, "loadSeconds": 7}},
    },
    {
        "metadata": {"namespace": "b", "name": "bad"},
        "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "OOMKilled"}]},
    },
]

AUTOSCALING = (
    AutoscalingRow(
        namespace="a",
        infsvc="good",
        desired_replicas=2,
        max_replicas=4,
        kv_used_replicas=1.25,
        waiting_requests=7,
        num_wakes=3,
        wake_s=41.5,
    ),
    AutoscalingRow(namespace="b", infsvc="new", desired_replicas=0, max_replicas=1),
)


def _telemetry(*, leads: bool = True) -> Telemetry:
    """Telemetry of an operator in which every kind of event has occurred."""
    telemetry = Telemetry()
    telemetry.set_sources(
        queue_depth=lambda: 3, leads=lambda: leads, services=lambda: SERVICES, autoscaling=lambda: AUTOSCALING
    )
    with telemetry.time_reconcile():
        pass
    for error in (ApiError(403, "Forbidden", "no"), ApiError(500, "", "odd"), TimeoutError(), ConnectionResetError()):
        telemetry.count_error(error)
    manifest = {"kind": "Service", "metadata": {"name": "s"}}
    gate = SetGate("pod", "uid", "1", "why")
    for action in (
        Apply(manifest, "why"),
        CreateOnce(manifest, "why"),
        Delete("Ingress", "i", "uid", "1", "why"),
        gate,
    ):
        telemetry.count_action(action)
    return telemetry


def _samples(telemetry: Telemetry, name: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(telemetry.exposition().decode())
    found = [sample for family in families for sample in family.samples if sample.name == f"octavo_operator_{name}"]
    return {tuple(label for _, label in sorted(sample.labels.items())): sample.value for sample in found}


def test_the_last_start_is_exported_by_phase() -> None:
    assert _samples(_telemetry(), "startup_seconds") == {("good", "b", "load"): 7}
    assert _samples(_telemetry(leads=False), "startup_seconds") == {}


def test_the_metrics_match_the_golden_list(golden: Callable[[str, str], None]) -> None:
    lines = []
    for family in text_string_to_metric_families(_telemetry().exposition().decode()):
        samples = [s for s in family.samples if not s.name.endswith("_created")]
        labels = sorted({name for s in samples for name in s.labels} - {"le"})
        bounds = [s.labels["le"] for s in samples if "le" in s.labels]
        name = family.name + "_total" * (family.type == "counter")
        lines.append(" ".join(filter(None, (name, family.type, ",".join(labels), *bounds))))
    golden("operator_metrics.txt", "\n".join(lines) + "\n")


def test_the_guide_names_all_metrics() -> None:
    listed = (Path(__file__).parent / "operator_metrics.txt").read_text().splitlines()
    ours = [line.split()[0] for line in listed if line.startswith("octavo_operator_")]
    assert [name for name in ours if f"| `{name}` |" not in PAGE.read_text()] == []


def test_errors_are_counted_by_reason() -> None:
    found = _samples(_telemetry(), "reconcile_errors_total")
    assert found == {("Forbidden",): 1, ("ApiError",): 1, ("Unreachable",): 2}


def test_only_the_leader_counts_services() -> None:
    assert _samples(_telemetry(), "services") == {
        ("False", "OOMKilled"): 1,
        ("True", "Serving"): 2,
        ("Unknown", ""): 1,
    }
    assert _samples(_telemetry(), "service_ready")["bad", "b", "OOMKilled"] == 0
    assert _samples(_telemetry(leads=False), "services") == {}
    assert _samples(_telemetry(leads=False), "leader") == {(): 0}


def test_only_the_leader_reports_autoscaling_and_unknown_values_are_absent() -> None:
    names = ("desired_replicas", "max_replicas", "kv_used_replicas", "waiting_requests", "wakes_total", "wake_seconds")
    good, new = ("good", "a"), ("new", "b")
    assert [_samples(_telemetry(), f"autoscaling_{name}") for name in names] == [
        {good: 2, new: 0},
        {good: 4, new: 1},
        {good: 1.25},
        {good: 7},
        {good: 3, new: 0},
        {good: 41.5},
    ]
    assert [_samples(_telemetry(leads=False), f"autoscaling_{name}") for name in names] == [{}] * 6


async def test_metrics_are_served_on_the_probes_port() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with (
        serve_health(f"{url}/healthz", Liveness(), _telemetry()),
        aiohttp.ClientSession() as session,
        session.get(f"{url}/metrics") as answer,
    ):
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert "octavo_operator_queue_depth 3.0" in await answer.text()


def test_metrics_exist_before_the_sources_are_set() -> None:
    assert _samples(Telemetry(), "queue_depth") == {(): 0}
    assert _samples(Telemetry(), "leader") == {(): 0}
