"""The engine table of docs/reference/metrics.md is made from the list of metrics: --update-golden writes it."""

from pathlib import Path

from octavo_engine.wire.metrics import Metric, active_metrics

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
BEGIN, END = "test_docs_metrics.py --update-golden -->\n", "<!-- end of engine metrics -->"


def row(metric: Metric) -> str:
    suffix = "_total" if metric.kind == "counter" else ""
    names = ", ".join(f"`{name}{suffix}`" for name in metric.exposed_names())
    details = ", ".join(metric.labels) or " ".join(f"{bound:g}" for bound in metric.buckets)
    only = " Only with `--kv-cache-metrics`." if metric.feature == "kv_cache_metrics" else ""
    return f"| {names} | {metric.kind} | {details} | {metric.help}{only} |\n"


def test_the_table_of_metrics_is_the_list(golden):
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.partition(END)[2]
    table = "| name | type | labels or buckets | |\n|---|---|---|---|\n" + "".join(
        map(row, active_metrics(frozenset({"kv_cache_metrics"})))
    )
    golden(str(PAGE), f"{before}{BEGIN}{table}{END}{after}")
