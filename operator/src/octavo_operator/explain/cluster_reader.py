"""`ClusterReader`: reads the cluster for an explanation, with the user's kubeconfig or the pod's account. It writes
only the fields that `octavo rollout` changes in a service.

Data that the user has no right to read is left out with a note; only the InferenceServices must be readable.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from octavo_operator.cluster.client import KINDS, ApiError, Raw, api_error, path_of
from octavo_operator.cluster.pods import FETCH
from octavo_operator.explain.explanation import Explanation, PodState, about_of, explain_service, pods_in_trouble
from octavo_operator.names import COMPONENT_LABEL, ENGINE, ROUTER, SERVICE_LABEL
from octavo_operator.spec.service import GROUP, KIND, VERSION

TIMEOUT_S = 10
LOG_LINES = 5
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Unexplained(Exception):
    """The service can't be explained; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Access:
    api: client.ApiClient
    namespace: str  # namespace to use if the user names none
    host: str


def access(kubeconfig: str | None, context: str | None) -> Access:
    settings = client.Configuration()
    settings.retries = False
    try:
        contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)  # type: ignore[no-untyped-call]
        chosen = next((c for c in contexts if c["name"] == context), None) if context else active
        if chosen is None:
            names = ", ".join(each["name"] for each in contexts)
            raise Unexplained(f"the kubeconfig has no context {context!r}: there are {names}.")
        config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)  # type: ignore[no-untyped-call]
        namespace = chosen["context"].get("namespace") or "default"
    except config.ConfigException as error:
        if kubeconfig is not None or context is not None:
            raise Unexplained(f"{kubeconfig or 'the kubeconfig'} can't be used: {error}") from error
        try:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            raise Unexplained(
                f"no cluster is configured: {error} Set $KUBECONFIG or --kubeconfig to the kubeconfig of your cluster."
            ) from error
        namespace = _NAMESPACE_FILE.read_text().strip()
    return Access(client.ApiClient(settings), namespace, settings.host)


class ClusterReader:
    def __init__(self, found: Access) -> None:
        self._api, self._host = found.api, found.host

    def explain(self, name: str, namespace: str) -> Explanation:
        """Explain one service. Raises Unexplained if it can't be read."""
        service, notes = self.service(name, namespace), dict[str, None]()
        pods = self._listed("Pod", namespace, f"{SERVICE_LABEL}={name}", notes)
        if shared := ((service["spec"].get("router") or {}).get("ref") or {}).get("name"):
            router = f"{SERVICE_LABEL}={shared},{COMPONENT_LABEL}={ROUTER}"
            pods += self._listed("Pod", namespace, router, notes)
        events = _about(name, pods, self._listed("Event", namespace, "", notes))
        explanation = explain_service(service, pods, events, notes)
        if explanation.is_ready:
            return explanation
        return replace(explanation, pods=tuple(self._with_last_lines(pod, namespace) for pod in explanation.pods))

    def explain_all(self, namespace: str | None) -> list[Explanation]:
        """Explain the services of a namespace, or of all namespaces if it is None. Raises Unexplained."""
        path = f"/apis/{GROUP}/{VERSION}/inferenceservices" if namespace is None else path_of(KIND, namespace)
        try:
            items = self._get(path)["items"]
        except (ApiError, HTTPError, ApiException) as error:
            where = "all namespaces" if namespace is None else f"the namespace {namespace!r}"
            raise self._unexplained(error, f"list inferenceservices in {where}") from error
        return [explain_service(item) for item in items]

    def service(self, name: str, namespace: str) -> Raw:
        """Read one service. Raises Unexplained."""
        return self._call_service("GET", "get", name, namespace)

    def patch_service(self, name: str, namespace: str, change: Raw) -> None:
        """Write these fields of a service; None removes a field. Raises Unexplained."""
        self._call_service("PATCH", "patch", name, namespace, change)

    def _call_service(self, method: str, verb: str, name: str, namespace: str, body: Raw | None = None) -> Raw:
        try:
            service: Raw = json.loads(self._call(method, path_of(KIND, namespace, name), body))
            return service
        except ApiError as error:
            if error.is_gone and error.reason:  # an error without a reason: the path is missing, as there is no CRD
                raise Unexplained(self._absent(name, namespace)) from error
            raise self._unexplained(error, f"{verb} inferenceservices in the namespace {namespace!r}") from error
        except (HTTPError, ApiException) as error:
            raise self._unexplained(error, "") from error

    def _absent(self, name: str, namespace: str) -> str:
        text = f"there is no InferenceService {name!r} in the namespace {namespace!r}"
        try:
            others = [one.name for one in self.explain_all(namespace)]
        except Unexplained:
            return f"{text}."
        hint = (
            f"there are {', '.join(others)}"
            if others
            else "it has no InferenceServices; select another namespace with -n"
        )
        return f"{text}: {hint}."

    def _unexplained(self, error: Exception, what: str) -> Unexplained:
        if not isinstance(error, ApiError):
            return Unexplained(f"the API server at {self._host} can't be reached: {_innermost(error)}.")
        if error.is_gone:
            return Unexplained(
                "this cluster has no InferenceServices: the CRD is not installed. "
                "helm install octavo charts/octavo -n octavo-system --create-namespace"
            )
        if error.status == HTTPStatus.UNAUTHORIZED:
            return Unexplained(f"the API server at {self._host} doesn't accept these credentials: log in again.")
        if error.status == HTTPStatus.FORBIDDEN:
            return Unexplained(f"you may not {what}: ask for a role with that right. {error.message}")
        return Unexplained(f"the API server at {self._host} answers {error}")

    def _listed(self, kind: str, namespace: str, selector: str, notes: dict[str, None]) -> list[Raw]:
        query = f"?labelSelector={quote(selector)}" if selector else ""
        try:
            items: list[Raw] = self._get(path_of(kind, namespace) + query)["items"]
        except (ApiError, HTTPError, ApiException) as error:
            why = error.message if isinstance(error, ApiError) else _innermost(error)
            notes[f"{KINDS[kind][1]} can't be listed: {why}"] = None
            return []
        return items

    def _with_last_lines(self, pod: PodState, namespace: str) -> PodState:
        """Add the last log lines of the pod's previous container or, if there is none, of the running container."""
        if not pods_in_trouble([pod]):
            return pod
        main = ROUTER if pod.component == ROUTER else ENGINE
        container = FETCH if pod.state in ("FetchFailed", "fetches the model") else main
        for previous in ("true", "false"):
            query = f"/log?container={container}&previous={previous}&tailLines={LOG_LINES}"
            try:
                lines = self._read(path_of("Pod", namespace, pod.name) + query).decode(errors="replace").splitlines()
            except (ApiError, HTTPError, ApiException):
                continue
            if lines:
                return replace(pod, last_lines=tuple(lines))
        return pod

    def _get(self, path: str) -> Raw:
        answer: Raw = json.loads(self._read(path))
        return answer

    def _read(self, path: str) -> bytes:
        return self._call("GET", path)

    def _call(self, method: str, path: str, body: Raw | None = None) -> bytes:
        """Raises ApiError for an error response, and the client's own errors if the API server was not reached."""
        kind = {} if body is None else {"Content-Type": "application/merge-patch+json"}
        _, url, headers, data, _ = self._api.param_serialize(
            method, path, header_params=kind, body=body, auth_settings=["BearerToken"]
        )
        answer = self._api.call_api(method, url, headers, data, _request_timeout=TIMEOUT_S)
        content: bytes = answer.read() or b""  # type: ignore[no-untyped-call]
        if answer.status < HTTPStatus.BAD_REQUEST:
            return content
        raise api_error(answer.status, content)


def _about(name: str, pods: Iterable[Raw], events: Iterable[Raw]) -> list[Raw]:
    objects = {(KIND, name), *(("Pod", pod["metadata"]["name"]) for pod in pods)}
    return [event for event in events if about_of(event) in objects]


def _innermost(error: Exception) -> str:
    """The text of the original error, which the client wraps."""
    while isinstance(inner := getattr(error, "reason", None), Exception):
        error = inner
    return str(error).rpartition(": ")[2].rstrip(".")
