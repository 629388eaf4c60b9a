"""Fixtures of the e2e suite (e2e/README.md): a cluster, the images, the installed chart, a ready service."""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes import config
from octavo_e2e.audit import AuditLog
from octavo_e2e.cluster import EXAMPLE, Cluster, Raw, Step
from octavo_e2e.evidence import PREFIX, save_evidence
from octavo_e2e.providers import ROOT, NoCluster, Provider, start
from octavo_e2e.release import Release

RESULTS = ROOT / "results" / "e2e"
IMAGES_S, TEST_S = 3600, 300
HAS_IMAGES = "E2E_HAS_IMAGES" in os.environ  # the cluster already has images of this commit
IS_LONG = "E2E_LONG" in os.environ
KEEPS = "E2E_KEEP" in os.environ  # keep the installation for inspection or the next run

_durations = pytest.StashKey[list[tuple[str, float]]]()
_cluster = pytest.StashKey[Cluster]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: runs with E2E_LONG=1 only")
    config.addinivalue_line("markers", "last: runs after all others, because it disturbs them or checks what they did")
    config.stash[_durations] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))
        if not IS_LONG and item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip("E2E_LONG=1 runs it"))
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    cluster = item.config.stash.get(_cluster, None)
    if report.failed and cluster is not None:
        folder = RESULTS / re.sub(r"[^\w.-]+", "-", item.nodeid)
        report.sections.append(("evidence", save_evidence(cluster, folder)))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, seconds in config.stash[_durations]:
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")


@pytest.fixture(scope="session")
def step(request: pytest.FixtureRequest) -> Step:
    """`with step("what"):` measures a part of a test; all durations are printed at the end."""

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        request.config.stash[_durations].append((name, time.monotonic() - began))

    return timed


@pytest.fixture(scope="session")
def provider(step: Step) -> Iterator[Provider]:
    try:
        with step("start the cluster"):
            found = start()
    except NoCluster as error:
        pytest.skip(str(error))
    yield found
    if found.stop and not KEEPS:
        found.run(*found.stop, within_s=120)


@pytest.fixture(scope="session")
def cluster(provider: Provider, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with config.new_client_from_config(provider.env["KUBECONFIG"]) as api:
        request.config.stash[_cluster] = Cluster(provider, api)
        yield request.config.stash[_cluster]
        api.rest_client.pool_manager.clear()


@pytest.fixture(scope="session")
def release(cluster: Cluster, step: Step) -> Iterator[Release]:
    """The chart with its default values, and newly built images."""
    if not HAS_IMAGES:
        with step("make images"):
            cluster.provider.run("make", "images", within_s=IMAGES_S)
    installed = Release(cluster)
    with step(f"helm {' '.join(installed.install())}"):
        installed.until_up()
    _delete_leftovers(cluster)
    yield installed
    if not KEEPS:
        installed.remove()


@pytest.fixture(scope="session")
def make_namespace(release: Release, cluster: Cluster) -> Iterator[Callable[[], str]]:
    """A function that creates a namespace with the suite's prefix; all are deleted at the end."""
    made: list[str] = []

    def make() -> str:
        made.append(f"{PREFIX}{secrets.token_hex(3)}")
        cluster.kubectl("create", "namespace", made[-1])
        return made[-1]

    yield make
    if not KEEPS:
        _delete(cluster, *made)


@pytest.fixture(scope="session")
def smollm2(cluster: Cluster, step: Step, make_namespace: Callable[[], str]) -> str:
    """The namespace where examples/smollm2.yaml serves. A test that changes the service must restore it."""
    namespace = make_namespace()
    with step("kubectl apply -f examples/smollm2.yaml"):
        cluster.apply(EXAMPLE, namespace)
    with step("kubectl wait --for=condition=Ready infsvc/smollm2"):
        wait = ("wait", "--for=condition=Ready", "--timeout=15m", "infsvc/smollm2")
        cluster.kubectl(*wait, "-n", namespace, within_s=920)
    return namespace


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, make_namespace: Callable[[], str]) -> Iterator[str]:
    made = make_namespace()
    yield made
    if not KEEPS:
        _delete(cluster, made)


@pytest.fixture(scope="session")
def audit(provider: Provider) -> AuditLog:
    if provider.audit_log is None:
        pytest.skip(f"the cluster ({provider.name}) has no readable audit log; the cluster of ../shared/k8s has one")
    return AuditLog(provider.audit_log)


def _delete_leftovers(cluster: Cluster) -> None:
    """Delete the namespaces of an interrupted run, whose services would claim the hosts of this run."""

    def of_suite(namespaces: Sequence[Raw]) -> list[str]:
        return [name for n in namespaces if (name := n["metadata"]["name"]).startswith(PREFIX)]

    if left := of_suite(cluster.find("Namespace", None)):
        _delete(cluster, *left)
        cluster.until("Namespace", None, lambda found: not of_suite(found), within_s=TEST_S, what="old namespaces gone")


def _delete(cluster: Cluster, *namespaces: str) -> None:
    cluster.kubectl("delete", "namespace", *namespaces, "--wait=false", "--ignore-not-found")
