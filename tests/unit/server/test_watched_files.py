"""Files that are read again when they change: a pipe or a device is refused at once, as reading it may never end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.api.adapter_file import read_adapter_file
from octavo_server.http.api_keys import read_keys, read_watched
from octavo_server.http.router_secret import read_secrets
from octavo_server.http.tenants_file import TenantsFile
from octavo_server.router.fleet.listed_services import ListedServices

READERS: list[Callable[[Path], object]] = [TenantsFile, ListedServices, read_adapter_file, read_keys, read_secrets]


@pytest.fixture(params=["pipe", "device"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "device":
        return Path("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_and_a_device_are_refused_with_their_name(read: Callable[[Path], object], path: Path) -> None:
    with pytest.raises(StartupError, match=f"{path}.*name a regular file"):
        read(path)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_watched(tmp_path / "link") == b"content"
