"""A real nginx in front of a server, with the directives that ingress-nginx writes for the operator's annotations.

All clients share kept-alive connections to the server. nginx forwards heads before bodies, and forwards `Upgrade`.
"""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo_testing.serve_command import free_port
from octavo_testing.waiting import eventually

MISSING_NGINX = "no nginx is installed: apt-get install nginx-light"
CONFIG = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; {user}
events {{ worker_connections 512; }}
http {{
  access_log off; client_max_body_size 0;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream server {{ server 127.0.0.1:{upstream_port}; keepalive 320; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Host $host;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade;
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""


def nginx_binary() -> str:
    """Return the path of nginx. Without nginx, skip the test, or fail it in CI."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None and os.environ.get("CI"):
        pytest.fail(MISSING_NGINX)
    if found is None:
        pytest.skip(MISSING_NGINX)
    return found


@contextmanager
def ingress(folder: Path, upstream_port: int) -> Iterator[int]:
    """Run nginx and yield the port that clients connect to."""
    binary, port = nginx_binary(), free_port()
    folder.mkdir()
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    config, log = folder / "nginx.conf", folder / "nginx.out"
    config.write_text(CONFIG.format(folder=folder, user=user, port=port, upstream_port=upstream_port))
    with log.open("wb") as output:
        process = subprocess.Popen([binary, "-c", str(config), "-e", str(log)], stdout=output, stderr=output)
    try:
        eventually(lambda: process.poll() is not None or _listens(port), describe=log.read_text)
        assert process.poll() is None, log.read_text()
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
