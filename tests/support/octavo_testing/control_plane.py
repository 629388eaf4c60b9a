"""`ControlPlane`: a real kube-apiserver over a real etcd, on loopback ports of its own, without nodes.

    with control_plane(folder, audit=True, controllers=(GARBAGE, NAMESPACES)) as plane:
        config.new_client_from_config(str(plane.kubeconfig()))         # as admin; the CRD is installed
        plane.kubeconfig(plane.create_account("default", "operator"))  # as a service account
        with plane.apiserver_down(): ...                               # SIGKILL; started again afterwards
        plane.audit.calls(user="operator")

Stored objects survive the kill of any part. No pod runs; only the named controllers run. Tests share one control plane
per session, with both controllers: the fixture `plane` in tests/cluster/conftest.py.

The binaries come from `KUBEBUILDER_ASSETS` (envtest's variable), else from PATH, else from the local cluster's tools.
Start parts from the main thread: the kernel kills each part when the thread that started it ends.
"""

import base64
import csv
import json
import os
import secrets
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from octavo_testing.audit_log import POLICY, AuditLog
from octavo_testing.cluster import local_binaries
from octavo_testing.component import Component
from octavo_testing.serve_command import free_port

LIMIT_S = 60.0
ADMIN, CONTROLLERS, PROXY = "admin", "controllers", "front-proxy-client"
GARBAGE, NAMESPACES = "garbage-collector-controller", "namespace-controller"
HPA = "horizontal-pod-autoscaler-controller"
CRD = Path(__file__).parents[3] / "crds" / "inferenceservices.serving.octavo.dev.yaml"
TOOLS = ("etcd", "kube-apiserver", "kube-controller-manager", "openssl")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ISSUER = "https://kubernetes.default.svc.cluster.local"


def tools() -> dict[str, str]:
    """Return the path of each tool that is found, by name."""
    folders = [os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"), local_binaries()]
    found = {name: shutil.which(name, path=os.pathsep.join(map(str, filter(None, folders)))) for name in TOOLS}
    return {name: path for name, path in found.items() if path is not None}


def missing_tools() -> str:
    """Return the reason to skip a test: a sentence that names missing tools, or an empty string."""
    missing = [name for name in TOOLS if name not in tools()]
    return f"{', '.join(missing)} not found: set KUBEBUILDER_ASSETS to where they are" if missing else ""


class ControlPlane:
    """`start` and `stop` act on all parts. A test may kill and start each of `etcd`, `apiserver` and `manager`."""

    def __init__(
        self, folder: Path, *, audit: bool = False, controllers: Sequence[str] = (), hpa_sync_s: int = 15
    ) -> None:
        self._folder = folder
        self._found = tools()
        self._tokens = {user: secrets.token_hex(16) for user in (ADMIN, CONTROLLERS)}
        self._etcd_url, peer_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.audit = AuditLog(folder / "audit.log")
        self.etcd = self._component("etcd", self._etcd_flags(peer_url))
        self.apiserver = self._component("kube-apiserver", self._apiserver_flags(audit=audit))
        self.manager = self._component("kube-controller-manager", self._manager_flags(controllers, hpa_sync_s))
        self._parts = [self.etcd, self.apiserver, *[self.manager] * bool(controllers)]

    def start(self) -> None:
        self._write_files()
        for part in self._parts[:2]:
            part.start()
        self.wait_until_ready()
        self.install_crd()
        self.kubeconfig(CONTROLLERS)
        for part in self._parts[2:]:
            part.start()

    def stop(self) -> None:
        for part in reversed(self._parts):
            part.kill()  # no data has to be saved

    def wait_until_ready(self) -> None:
        self._wait(lambda: self.is_answering("/readyz"))

    @contextmanager
    def apiserver_down(self) -> Iterator[None]:
        """Kill the API server, and start it at the same address after the block."""
        self.apiserver.kill()
        try:
            yield
        finally:
            self.apiserver.start()
            self.wait_until_ready()

    def kubeconfig(self, user: str = ADMIN) -> Path:
        """Write a kubeconfig. `user` is `ADMIN` or a name from `create_account`."""
        cluster = {
            "server": self.url,
            "certificate-authority-data": base64.b64encode(self.ca_certificate).decode(),
        }
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "plane", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "plane", "context": {"cluster": "plane", "user": user}}],
            "current-context": "plane",
        }
        path = self._folder / f"{user.replace(':', '.')}.kubeconfig"
        path.write_text(json.dumps(content))
        return path

    def create_account(self, namespace: str, name: str, rules: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Create a service account with these rules in all namespaces, or as cluster-admin. Return its user name."""
        core, rbac = f"/api/v1/namespaces/{namespace}/serviceaccounts", "/apis/rbac.authorization.k8s.io/v1"
        self.call("POST", core, {"metadata": {"name": name}})
        role = "cluster-admin" if rules is None else f"{namespace}-{name}"
        if rules is not None:
            self.call("POST", f"{rbac}/clusterroles", {"metadata": {"name": role}, "rules": list(rules)})
        binding = {
            "metadata": {"name": f"{namespace}-{name}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        self.call("POST", f"{rbac}/clusterrolebindings", binding)
        return self.issue_token(namespace, name)

    def issue_token(self, namespace: str, name: str) -> str:
        """Issue a token for an existing service account, so that `kubeconfig` accepts its user; return the user."""
        user = f"system:serviceaccount:{namespace}:{name}"
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        self._tokens[user] = self.call("POST", path, {"spec": {}})["status"]["token"]
        return user

    def compact(self) -> None:
        """Compact etcd's history: a watch from an older resourceVersion gets a 410."""
        latest = self._ask_etcd("range", key=base64.b64encode(b"/").decode())["header"]["revision"]
        self._ask_etcd("compaction", revision=latest, physical=True)

    def wipe_etcd(self) -> None:
        """Empty etcd, as a failed restore does, and leave the API server killed: the test starts it again."""
        self.apiserver.kill()
        self.etcd.kill()
        shutil.rmtree(self._folder / "etcd")
        self.etcd.start()

    def call(self, method: str, path: str, body: Mapping[str, Any] | list[Any] | None = None, *, kind: str = "") -> Any:
        """Send a request as admin. `kind` is the content type. Default: JSON."""
        return json.loads(self._fetch(method, path, body, kind) or b"{}")

    def _fetch(
        self, method: str, path: str, body: Mapping[str, Any] | list[Any] | None = None, kind: str = ""
    ) -> bytes:
        headers = self.headers() | ({"Content-Type": kind} if kind else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=self.ssl_context) as answer:
            content: bytes = answer.read()
            return content

    @property
    def ca_certificate(self) -> bytes:
        """CA certificate for clients. The API server creates it at its first start."""
        return (self._folder / "apiserver" / "apiserver.crt").read_bytes()

    def headers(self, user: str = ADMIN) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._tokens[user]}", "Content-Type": "application/json"}

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.ca_certificate.decode())

    def _component(self, name: str, flags: Mapping[str, object]) -> Component:
        command = [self._found[name], *(f"--{flag}={value}" for flag, value in flags.items())]
        return Component(name, command, self._folder / f"{name}.log")

    def _etcd_flags(self, peer_url: str) -> dict[str, object]:
        return {
            "data-dir": self._folder / "etcd",
            "listen-client-urls": self._etcd_url,
            "advertise-client-urls": self._etcd_url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"default={peer_url}",
            "unsafe-no-fsync": "true",
            "log-level": "warn",
        }

    def _apiserver_flags(self, *, audit: bool) -> dict[str, object]:
        key = self._folder / "accounts.key"
        audited = {"audit-policy-file": self._folder / "audit.yaml", "audit-log-path": self.audit.path}
        return {
            "etcd-servers": self._etcd_url,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": self._port,
            "endpoint-reconciler-type": "none",
            "cert-dir": self._folder / "apiserver",
            "token-auth-file": self._folder / "tokens.csv",
            "authorization-mode": "RBAC",
            "disable-admission-plugins": "ServiceAccount",  # no controller creates the default service accounts
            "service-cluster-ip-range": "10.0.0.0/16",
            "service-account-issuer": ISSUER,
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            **self._proxy_flags(),
            **(audited if audit else {}),
        }

    def _proxy_flags(self) -> dict[str, object]:
        """Flags of the aggregation layer: by this certificate, servers of other APIs know this API server."""
        certificate = self._folder / "proxy.crt"
        return {
            "proxy-client-cert-file": certificate,
            "proxy-client-key-file": self._folder / "proxy.key",
            "requestheader-client-ca-file": certificate,
            "requestheader-allowed-names": PROXY,
            "requestheader-username-headers": "X-Remote-User",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        }

    def _manager_flags(self, controllers: Sequence[str], hpa_sync_s: int) -> dict[str, object]:
        return {
            "kubeconfig": self._folder / f"{CONTROLLERS}.kubeconfig",
            "controllers": ",".join(controllers),
            "leader-elect": "false",
            "horizontal-pod-autoscaler-sync-period": f"{hpa_sync_s}s",
            "kube-api-qps": 200,
            "kube-api-burst": 200,
            "secure-port": 0,
        }

    def _write_files(self) -> None:
        with (self._folder / "tokens.csv").open("w", newline="") as file:
            rows = [[token, user, user, "system:masters"] for user, token in self._tokens.items()]
            csv.writer(file).writerows(rows)
        (self._folder / "audit.yaml").write_text(POLICY)
        self._openssl("genrsa", "-out", str(self._folder / "accounts.key"), "2048")
        files = ["-keyout", str(self._folder / "proxy.key"), "-out", str(self._folder / "proxy.crt")]
        self._openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={PROXY}", *files)

    def _openssl(self, *args: str) -> None:
        subprocess.run([self._found["openssl"], *args], check=True, capture_output=True, timeout=LIMIT_S)

    def install_crd(self) -> None:
        manifest = yaml.safe_load(CRD.read_text())
        self.call("POST", CRDS, manifest)
        self._wait(lambda: self.is_answering("/apis/serving.octavo.dev/v1alpha1/inferenceservices"))

    def is_answering(self, path: str) -> bool:
        try:
            self._fetch("GET", path)
        except OSError:
            return False
        return True

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            self.etcd.assert_running()
            self.apiserver.assert_running()
            assert time.monotonic() < deadline, f"not ready after {LIMIT_S:g} s:\n{self.apiserver.log_tail()}"
            time.sleep(0.05)

    def _ask_etcd(self, act: str, **body: object) -> Any:
        request = urllib.request.Request(f"{self._etcd_url}/v3/kv/{act}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())


@contextmanager
def control_plane(
    folder: Path, *, audit: bool = False, controllers: Sequence[str] = (), hpa_sync_s: int = 15
) -> Iterator[ControlPlane]:
    """Run a control plane in the empty `folder`, and stop all its processes afterwards."""
    plane = ControlPlane(folder, audit=audit, controllers=controllers, hpa_sync_s=hpa_sync_s)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
