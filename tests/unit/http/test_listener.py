import resource
import socket

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.http.listener import MAX_OPEN_FILES, RESERVED_FILES, allow_connections, bind, listen

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def limit_files(monkeypatch):
    """Return a function that sets both limits of this process and returns the limits that are set later."""

    def limit(soft, hard):
        new = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: new.append(limits))
        return new

    return limit


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "files_each", "allowed"),
    [
        (1024, UNLIMITED, (MAX_OPEN_FILES, UNLIMITED), 1, 4096),
        (1024, 1_048_576, (MAX_OPEN_FILES, 1_048_576), 2, 4096),
        (1024, 4096, (4096, 4096), 1, 4096 - RESERVED_FILES),
        (4096, 4096, None, 2, (4096 - RESERVED_FILES) // 2),
        (256, 256, None, 1, 128),
        (100_000, 100_000, None, 1, 4096),
        (UNLIMITED, UNLIMITED, None, 1, 4096),
        (64, 64, None, 1, 16),
    ],
)
def test_connections_leave_descriptors_for_the_rest(limit_files, caplog, soft, hard, raised, files_each, allowed):
    new = limit_files(soft, hard)
    assert allow_connections(4096, files_each=files_each) == allowed
    assert new == ([] if raised is None else [raised])
    assert len(caplog.records) == (allowed < 4096)
    assert allow_connections(10, files_each=files_each) == 10


def test_too_low_a_limit_of_open_files_is_one_line(limit_files):
    limit_files(24, 24)
    with pytest.raises(StartupError, match="24, less than 64: run ulimit -n"):
        allow_connections(4096)


def test_a_port_on_which_another_process_listens_is_named():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            listen(first)
            with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
                listen(second)


def test_a_unix_socket_on_which_nothing_can_listen_is_named(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "socket"))
        with pytest.raises(StartupError, match=r"cannot listen on .*socket.*--uds"):
            listen(sock)
