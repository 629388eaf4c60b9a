"""`octavo explain infsvc`, registered as an entry point: prints why a service is not ready, and the remedy."""

import json
import sys
from dataclasses import asdict

from octavo_operator.explain.cluster_reader import ClusterReader, Unexplained, access
from octavo_operator.explain.text import lines_of, table_of


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
