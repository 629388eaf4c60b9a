"""`octavo explain infsvc`, registered as an entry point: prints why a service is not ready, and the remedy."""

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from octavo_operator.explain.cluster_reader import ClusterReader, Unexplained, access
from octavo_operator.explain.explanation import Explanation, pods_in_trouble

WIDTH = 110
_MARKS = {"holds": "ok", "open": "--", "waits": "..", "fails": "NO", "unknown": "??"}


def explain(
    name: str | None,
    *,
    namespace: str | None = None,
    all_namespaces: bool = False,
    kubeconfig: str | None = None,
    context: str | None = None,
    as_json: bool = False,
) -> int:
    """Explain one service, or all if `name` is None. Return the exit code: 0 if all explained services are Ready."""
    try:
        cluster = access(kubeconfig, context)
        with cluster.api:
            reader, where = ClusterReader(cluster), namespace or cluster.namespace
            if name is None:
                return _show_all(reader, None if all_namespaces else where, as_json)
            explanation = reader.explain(name, where)
    except Unexplained as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(explanation), indent=2) if as_json else "\n".join(lines_of(explanation)))
    return 0 if explanation.is_ready else 1


def _show_all(reader: ClusterReader, namespace: str | None, as_json: bool) -> int:
    explanations = reader.explain_all(namespace)
    if as_json:
        print(json.dumps([asdict(one) for one in explanations], indent=2))
    elif explanations:
        print("\n".join(table_of(explanations)))
    else:
        where = "in any namespace" if namespace is None else f"in the namespace {namespace!r}"
        print(f"octavo: there are no InferenceServices {where}.", file=sys.stderr)
    return 0 if all(one.is_ready for one in explanations) else 1


def lines_of(found: Explanation) -> Iterator[str]:
    title = f"InferenceService {found.name} in {found.namespace}: {found.model}"
    yield title if not found.replicas else f"{title}, {found.replicas} replicas"
    yield from (f"  ({note})" for note in found.notes)
    yield ""
    yield from _chain(found)
    yield ""
    yield from _verdict(found)
    yield from _scaling(found)
    yield from _pods(found)
    if found.events and not found.is_ready:
        yield from ("", "Latest events")
        rows = [(e.when, e.kind, e.about, e.reason, _counted(e.message, e.count)) for e in found.events]
        yield from _table(rows)
    if found.commands:
        yield from ("", "More commands", *(f"  {command}" for command in found.commands))


def table_of(found: Sequence[Explanation]) -> Iterator[str]:
    rows = [("NAMESPACE", "NAME", "MODEL", "READY", "REPLICAS", "REASON", "MESSAGE")]
    for one in found:
        reason, message = ("Serving", one.url) if one.cause is None else (one.cause.reason, one.cause.message)
        ready = "True" if one.is_ready else "False"
        rows.append((one.namespace, one.name, one.model, ready, one.replicas or "-", reason, message))
    yield from (line.removeprefix("  ") for line in _table(rows))


def _chain(found: Explanation) -> Iterator[str]:
    width = max(len(f"{link.condition} {link.reason}") for link in found.chain)
    cause = found.cause
    for link in found.chain:
        here = "   <- here" if cause is not None and link.condition == cause.condition else ""
        yield f"  {_MARKS[link.state]}  {f'{link.condition} {link.reason}':{width}}{here}".rstrip()


def _verdict(found: Explanation) -> Iterator[str]:
    if found.cause is None:
        yield f"Ready: it serves requests at {found.url}" if found.url else "Ready."
        return
    yield f"Not ready: {found.cause.reason}."
    yield from _wrapped(found.cause.message)
    yield from _wrapped(f"Meaning: {found.cause.meaning}")
    if found.cause.remedy:
        yield from _wrapped(f"Remedy: {found.cause.remedy}")


def _scaling(found: Explanation) -> Iterator[str]:
    if found.scaling is None:
        return
    yield from ("", f"Autoscaling: {found.scaling.reason}.")
    yield from _wrapped(found.scaling.message)
    if found.scaling.remedy:
        yield from _wrapped(f"Remedy: {found.scaling.remedy}")


def _pods(found: Explanation) -> Iterator[str]:
    pods = pods_in_trouble(found.pods) if found.is_ready else found.pods
    if not pods:
        return
    yield from ("", "Pods")
    for pod in pods:
        restarts = f", restarted {pod.restarts} times" if pod.restarts else ""
        yield f"  {pod.name} ({pod.component}): {pod.state}{restarts}"
        yield from _wrapped(pod.message, indent=6)
        yield from (f"      | {line}" for line in pod.last_lines)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row[:-1], widths, strict=True))
        yield "  " + "  ".join((*cells, row[-1])).rstrip()


def _counted(message: str, count: int) -> str:
    return message if count == 1 else f"{message} (x{count})"


def _wrapped(text: str, *, indent: int = 2) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
