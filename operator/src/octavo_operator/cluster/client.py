"""The operator's calls to the API server, over the official client's connection and credentials.

Fields are written by server-side apply under the operator's field manager, so fields of other managers stay untouched.
A delete names the observed uid, so that it can't hit a successor of the same name.
"""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient

from octavo_operator.names import ADAPTER_LIST, ADMITTED_EPOCH, APPLIED, MANAGER
from octavo_operator.spec.service import GROUP, KIND, VERSION

Raw = dict[str, Any]
TIMEOUT_S = 30.0
_TRANSIENT = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.CONFLICT,
    HTTPStatus.TOO_MANY_REQUESTS,
)
#: Messages of responses with status 500 that a retry can't change: a webhook that does not answer, and a manifest that
#: does not have its kind's types (unknown fields, wrong types, duplicate entries; texts that are no quantities,
#: fractions). They have no reason of their own.
_PERMANENT_500 = ("failed calling webhook", "failed to create typed patch object", "failed to convert new object")
NO_VERSION = "1"
APPLY = "application/apply-patch+yaml"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PAGE, PAGE_S = 500, 5.0  # objects per page; seconds per page: a server that has just started may never answer a request
STRATEGIC, MERGE = "application/strategic-merge-patch+json", "application/merge-patch+json"

#: kind -> (group and version, plural)
KINDS: dict[str, tuple[str, str]] = {
    "Secret": ("v1", "secrets"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "ConfigMap": ("v1", "configmaps"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Pod": ("v1", "pods"),
    "Event": ("events.k8s.io/v1", "events"),
    "Deployment": ("apps/v1", "deployments"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
    "APIService": ("apiregistration.k8s.io/v1", "apiservices"),
    "Ingress": ("networking.k8s.io/v1", "ingresses"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", "httproutes"),
    "PodMonitor": ("monitoring.coreos.com/v1", "podmonitors"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    KIND: (f"{GROUP}/{VERSION}", "inferenceservices"),
}


@dataclass(slots=True)
class ApiError(Exception):
    """An error response of the API server; status 503 if it can't be reached or does not answer in time."""

    status: int
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.status} {self.reason}: {self.message}"

    @property
    def is_gone(self) -> bool:
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def is_conflict(self) -> bool:
        return self.status == HTTPStatus.CONFLICT


def is_transient(error: ApiError) -> bool:
    """Return whether a retry may succeed. A person must repair some errors of status 500 (`_PERMANENT_500`), too."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return not any(text in error.message for text in _PERMANENT_500)
    return error.status in _TRANSIENT


def is_of_one_object(error: ApiError) -> bool:
    """Return whether a transient error concerns one object only: writes of others may succeed."""
    return error.status in (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.GATEWAY_TIMEOUT)


async def is_found(call: Awaitable[object]) -> bool:
    """Await a call; return False if its object is gone, or its kind is not served."""
    try:
        await call
    except ApiError as error:
        if not error.is_gone:
            raise
        return False
    return True


class Cluster:
    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def apply(self, manifest: Mapping[str, Any]) -> Raw:
        """Apply the manifest (server-side); its values replace other managers' values of the same fields."""
        path = path_of(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        return await self._call("PATCH", path, manifest, kind=APPLY, query=_OURS)

    async def apply_new(self, manifest: Mapping[str, Any]) -> Raw:
        """Apply the manifest of an object that must not exist yet; any existing object causes a conflict: none can have
        the requested resourceVersion, and the API server compares it only if the object exists.
        """
        metadata = {**manifest["metadata"], "resourceVersion": NO_VERSION}
        return await self.apply({**manifest, "metadata": metadata})

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Raw:
        path = path_of(KIND, namespace, name) + "/status"
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": status,
        }
        return await self._call("PATCH", path, body, kind=APPLY, query=_OURS)

    async def create(self, manifest: Mapping[str, Any]) -> bool:
        """Create the object; return False if an object of this name exists."""
        try:
            await self._call("POST", path_of(manifest["kind"], manifest["metadata"]["namespace"]), manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":  # status 409 may also be a conflict over a quota
                raise
            return False
        return True

    async def replace(self, manifest: Mapping[str, Any]) -> Raw:
        """Replace the object. It fails with a conflict if the object was written after the manifest was read."""
        path = path_of(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        return await self._call("PUT", path, manifest)

    async def read(self, kind: str, namespace: str | None, name: str) -> Raw:
        return await self.read_path(path_of(kind, namespace, name))

    async def read_path(self, path: str) -> Raw:
        return await self._call("GET", path)

    async def patch(self, kind: str, namespace: str | None, name: str, body: Mapping[str, Any]) -> Raw:
        """Merge the body into the object (RFC 7386)."""
        return await self._merge(path_of(kind, namespace, name), body)

    async def find(self, kind: str, namespace: str, name: str) -> Raw | None:
        """Read an object by a list request with its name: the watches need the right to list, so no right to get is
        needed."""
        objects = await self._list(kind, namespace, f"metadata.name={name}")
        return objects[0] if objects else None

    async def list_warnings(self, namespace: str, **regarding: str) -> list[Raw]:
        """List the Warnings about an object. `regarding`: fields of the reference to it, such as its uid."""
        fields = (f",regarding.{name}={value}" for name, value in regarding.items())
        return await self._list("Event", namespace, "type=Warning" + "".join(fields))

    async def list_uids(self, kind: str, namespace: str | None, *, label: str = "") -> set[str]:
        """Uids of all objects with the label, in one namespace or in all."""
        uids: set[str] = set()
        query = f"?limit={PAGE}" + (f"&labelSelector={quote(label)}" if label else "")
        next_page = ""
        while True:
            page = await self._call(
                "GET", path_of(kind, namespace), accept=METADATA, query=query + next_page, timeout_s=PAGE_S
            )
            uids.update(item["metadata"]["uid"] for item in page.get("items") or ())
            if not (token := page["metadata"].get("continue")):
                return uids
            next_page = f"&continue={quote(token)}"

    async def delete(self, kind: str, namespace: str, name: str, uid: str, version: str) -> bool:
        """Delete the object; return False if it is gone. Fails with a conflict if it was replaced or changed."""
        body = {"preconditions": {"uid": uid, "resourceVersion": version}, "propagationPolicy": "Background"}
        return await is_found(self._call("DELETE", path_of(kind, namespace, name), body))

    async def set_gate(
        self, namespace: str, pod: str, uid: str, *, epoch: str | None, condition: Mapping[str, str]
    ) -> bool:
        """Set the condition of the pod's readiness gate, and the admitted epoch as an annotation, in one request.

        Return False if the pod is gone. It fails with a conflict if another pod has its name now.
        """
        annotations = {ADMITTED_EPOCH: epoch}  # null removes an annotation
        return await self._patch_pod(namespace, pod, uid, annotations, status={"conditions": [condition]})

    async def notify_pod(self, namespace: str, pod: str, uid: str, *, digest: str) -> bool:
        """Set the annotation with the digest of the list of adapters. Return False if the pod is gone. It fails with a
        conflict if another pod has its name now."""
        return await self._patch_pod(namespace, pod, uid, {ADAPTER_LIST: digest})

    async def _patch_pod(
        self, namespace: str, pod: str, uid: str, annotations: Mapping[str, str | None], **fields: Any
    ) -> bool:
        body = {"metadata": {"uid": uid, "annotations": annotations}, **fields}
        return await is_found(self._call("PATCH", path_of("Pod", namespace, pod) + "/status", body, kind=STRATEGIC))

    async def scale_service(self, namespace: str, name: str, replicas: int, *, version: str) -> None:
        """Set the replicas of an InferenceService. It fails with a conflict if `version` is not its latest version."""
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._merge(path_of(KIND, namespace, name) + "/scale", body)

    async def set_replicas(self, kind: str, namespace: str, name: str, uid: str, replicas: int) -> Raw:
        """Scale an object. Fails with a conflict if another object has its name now. The digest of the manifest is
        replaced, so that the next accepted spec does not treat the number as a foreign change to repair."""
        metadata = {"uid": uid, "annotations": {APPLIED: f"replicas-{replicas}"}}
        body = {"metadata": metadata, "spec": {"replicas": replicas}}
        return await self.patch(kind, namespace, name, body)

    async def _merge(self, path: str, body: Mapping[str, Any]) -> Raw:
        return await self._call("PATCH", path, body, kind=MERGE, query=f"?fieldManager={MANAGER}")

    async def _list(self, kind: str, namespace: str, fields: str) -> list[Raw]:
        answer = await self._call("GET", path_of(kind, namespace), query=f"?fieldSelector={quote(fields)}")
        return [{"apiVersion": KINDS[kind][0], "kind": kind, **item} for item in answer["items"]]

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        kind: str = "application/json",
        accept: str = "application/json",
        query: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Raw:
        try:
            async with asyncio.timeout(timeout_s):
                status, data = await self._fetch(method, path + query, body, kind, accept)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            what = str(error) or f"no answer within {timeout_s:g} s"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "Unreachable", f"{method} {path}: {what}") from error
        if status >= HTTPStatus.BAD_REQUEST:
            raise api_error(status, data)
        return _content(data)

    async def _fetch(
        self, method: str, path: str, body: Mapping[str, Any] | None, kind: str, accept: str
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": kind, "Accept": accept}
        _, url, headers, _, _ = await self._api.param_serialize(
            method, path, header_params=headers, auth_settings=["BearerToken"]
        )
        answer = await self._api.call_api(method, url, headers, body)
        return answer.status, await answer.response.read()


def api_error(status: int, data: bytes) -> ApiError:
    """Make an ApiError from the status and body of a response."""
    content = _content(data)
    return ApiError(status, content.get("reason", ""), content.get("message", ""))


def _content(data: bytes) -> Raw:
    """Parse a response body as JSON, if it is: a proxy in front of the API server may send other text."""
    try:
        content = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {"message": data[:200].decode(errors="replace")}


_OURS = f"?fieldManager={MANAGER}&force=true"


def path_of(kind: str, namespace: str | None, name: str = "") -> str:
    """URL path of an object or, without a name, of all objects of the kind; `namespace` None: of the whole cluster."""
    version, plural = KINDS[kind]
    root = "/api" if "/" not in version else "/apis"
    place = "" if namespace is None else f"namespaces/{namespace}/"
    return f"{root}/{version}/{place}{plural}" + (f"/{name}" if name else "")
