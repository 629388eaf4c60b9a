"""`ClusterReader` reads the logs of pods and selects the kubeconfig; a file server plays the API server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_operator.explain.cluster_reader import ClusterReader, Unexplained, access
from octavo_testing.file_server import FileServer, Handler

ROOT = "/api/v1/namespaces/team"
PODS = f"{ROOT}/pods?labelSelector=serving.octavo.dev/service%3Dllm"
POD = {
    "metadata": {"name": "llm-1", "uid": "u", "labels": {"app.kubernetes.io/component": "engine"}},
    "status": {
        "containerStatuses": [
            {"name": "engine", "restartCount": 1, "state": {}, "lastState": {"terminated": {"exitCode": 1}}}
        ]
    },
}
FETCHES = {"name": "fetch", "restartCount": 0, "state": {"running": {}}}
SERVICE = {"metadata": {"name": "llm", "namespace": "team", "generation": 1}, "spec": {"model": {"uri": "hf://a/b"}}}


class _ApiHandler(Handler):
    def answer(self) -> None:
        content = self.site.files.get(self.path)
        self.send_whole(404 if content is None else 200, content or b"{}")


class ApiServer(FileServer):
    handler_class = _ApiHandler


@pytest.fixture
def server() -> ApiServer:
    server = ApiServer()
    server.files = {
        "/apis/serving.octavo.dev/v1alpha1/namespaces/team/inferenceservices/llm": json.dumps(SERVICE).encode(),
        PODS: json.dumps({"items": [POD]}).encode(),
        "/apis/events.k8s.io/v1/namespaces/team/events": b'{"items": []}',
    }
    return server


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> Iterator[str]:
    with server.running() as address:
        content = {
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [
                {"name": "first", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
                {"name": "second", "context": {"cluster": "c", "user": "u"}},
            ],
            "current-context": "first",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(content))
        yield str(tmp_path / "kubeconfig")


def last_lines(kubeconfig: str) -> tuple[str, ...]:
    with (found := access(kubeconfig, None)).api:
        (pod,) = ClusterReader(found).explain("llm", "team").pods
    return pod.last_lines


def log(container: str, *, previous: str) -> str:
    return f"{ROOT}/pods/llm-1/log?container={container}&previous={previous}&tailLines=5"


def test_a_worker_has_the_container_of_an_engine(server: ApiServer, kubeconfig: str) -> None:
    labels = {"app.kubernetes.io/component": "engine-worker"}
    worker = POD | {"metadata": {"name": "llm-1", "uid": "u", "labels": labels}}
    server.files[PODS] = json.dumps({"items": [worker]}).encode()
    server.files[log("engine", previous="false")] = b"waiting for its leader\n"
    assert last_lines(kubeconfig) == ("waiting for its leader",)


def test_the_log_of_the_previous_container_is_preferred(server: ApiServer, kubeconfig: str) -> None:
    assert last_lines(kubeconfig) == ()
    server.files[log("engine", previous="false")] = b"starting\n"
    assert last_lines(kubeconfig) == ("starting",)
    server.files[log("engine", previous="true")] = b"loading\nno such flag\n"
    assert last_lines(kubeconfig) == ("loading", "no such flag")


def test_the_log_of_a_fetch_is_read(server: ApiServer, kubeconfig: str) -> None:
    fetching = {**POD, "status": {"initContainerStatuses": [FETCHES]}}
    path = f"{ROOT}/pods?labelSelector=serving.octavo.dev/service%3Dllm"
    server.files[path] = json.dumps({"items": [fetching]}).encode()
    server.files[log("fetch", previous="false")] = b"1 of 5 GiB\n"
    assert last_lines(kubeconfig) == ("1 of 5 GiB",)


def test_a_context_selects_the_default_namespace(kubeconfig: str) -> None:
    for context, namespace in ((None, "team"), ("first", "team"), ("second", "default")):
        with (found := access(kubeconfig, context)).api:
            assert found.namespace == namespace
    with pytest.raises(Unexplained, match="the kubeconfig has no context 'third': there are first, second"):
        access(kubeconfig, "third")


def test_a_missing_cluster_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(Unexplained, match=r"no cluster is configured: .* Set \$KUBECONFIG"):
        access(None, None)
