"""`metrics_api`: the custom metrics API (custom.metrics.k8s.io/v1beta2) of InferenceServices, with a test's values."""

import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from octavo_operator.metrics_api.server import GROUP, GROUP_VERSION, RESOURCE, VERSION, failure, value_list
from octavo_operator.timestamps import now_text

API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"

Value = Callable[[str, str], float | None]  # name of a service and of a metric -> its value; None: 404


@contextmanager
def metrics_api(folder: Path, value: Value) -> Iterator[int]:
    """Serve the API on the loopback with a self-signed certificate in `folder`; yield the port."""
    handler = type("BoundHandler", (_Handler,), {"value": staticmethod(value)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = _tls(folder).wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def api_objects(
    namespace: str, port: int, *, name: str = "metrics-api", verified: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects that register a server on this port of the loopback, each with the path of its collection.
    `verified`: the server's certificate must be of the authority that the operator writes into the APIService."""
    service = {"metadata": {"name": name}, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    spec = {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": not verified,
        "service": {"namespace": namespace, "name": name, "port": port},
    }
    return [
        (f"/api/v1/namespaces/{namespace}/services", service),
        (API_SERVICES, {"metadata": {"name": f"{VERSION}.{GROUP}"}, "spec": spec}),
    ]


def _tls(folder: Path) -> ssl.SSLContext:
    key, certificate = folder / "metrics.key", folder / "metrics.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *files], check=True, capture_output=True, timeout=240)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    value: Value

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        if "/".join(path) == f"apis/{GROUP_VERSION}":
            resources = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": []}
            return self._send(HTTPStatus.OK, resources)
        if path[3:4] == ["namespaces"] and path[5:6] == [RESOURCE] and len(path) == 8:
            value = self.value(path[6], path[7])
            if value is not None:
                return self._send(HTTPStatus.OK, value_list(path[4], path[6], path[7], value, now_text()))
        return self._send(HTTPStatus.NOT_FOUND, failure(HTTPStatus.NOT_FOUND, f"{self.path} not found"))

    def _send(self, status: HTTPStatus, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
