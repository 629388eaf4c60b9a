"""`octavo route --admin-port` as a user starts it, with one process and with several."""

import time

import httpx
import pytest
from octavo_testing.route_command import octavo_route
from octavo_testing.serve_command import free_port

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_admin_port_serves_only_scrapers_and_administrators(tmp_path, num_workers):
    port = free_port()
    flags = ("--admin-port", str(port), "--workers", str(num_workers), "--replica", "http://127.0.0.1:9")
    with octavo_route(tmp_path, *flags, "--max-hold-time", "0") as route:
        admin = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while not answers(admin) or not answers(route.url):
            assert time.monotonic() < deadline, route.log.read_text()
            time.sleep(0.05)
        for path in ("/metrics", "/debug/index", "/drain"):
            found = [httpx.get(url + path).status_code for url in (route.url, admin) for _ in range(3)]
            assert found == [404, 404, 404, 200, 200, 200]
        assert httpx.get(f"{route.url}/v1/models").status_code == 200
        assert httpx.get(f"{admin}/v1/models").status_code == 404


def answers(url):
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
