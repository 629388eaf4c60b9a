"""The access log's fields in JSON, and the file of the usage log."""

import json
import logging
import os
from pathlib import Path

import pytest
from octavo_engine.log_format import JsonFormatter
from octavo_engine.wire.errors import StartupError
from octavo_server.access_log import REPLICA, AccessLogFilter, UsageLog
from octavo_server.cli.server_checks import check_usage_log
from octavo_server.config import ServerConfig
from octavo_server.http.request_threads import TENANT


def logged(path="/v1/completions"):
    """Return the fields of an access line in JSON, None if it is left out."""
    arguments = ("127.0.0.1:9", "POST", path, "1.1", 499)
    message = '%s - "%s %s HTTP/%s" %d'
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 1, message, arguments, None)
    return json.loads(JsonFormatter("router").format(record)) if AccessLogFilter().filter(record) else None


@pytest.mark.parametrize(
    ("tenant", "replica", "fields"),
    [
        ("", "", {"tenant": "(keyless)", "code": 499}),
        ("alice", "10.0.0.1:8000", {"tenant": "alice", "code": 499, "replica": "10.0.0.1:8000"}),
        ('a"\n{', "", {"tenant": 'a"\n{', "code": 499}),
    ],
)
def test_an_access_line_has_tenant_code_and_replica(tenant, replica, fields):
    tokens = TENANT.set(tenant), REPLICA.set(replica)
    line = logged()
    TENANT.reset(tokens[0])
    REPLICA.reset(tokens[1])
    assert line.items() >= {**fields, "level": "info", "process": "router"}.items()
    assert ("replica" in line) == bool(replica)


def test_probes_have_no_access_line():
    assert logged("/health?x=1") is None


def test_a_log_that_cannot_be_written_stops_the_start(tmp_path):
    with pytest.raises(StartupError, match="Is a directory"):
        UsageLog(str(tmp_path))


def test_a_new_log_is_not_readable_by_everybody(tmp_path):
    UsageLog(str(tmp_path / "log"))
    assert (tmp_path / "log").stat().st_mode & 0o007 == 0


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_pipe_neither_blocks_the_start_nor_the_server(tmp_path, has_reader):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    with pytest.raises(StartupError, match=r"--usage-log .*/pipe: .*: name a file that can be written"):
        UsageLog(str(tmp_path / "pipe"))
    if reader is not None:
        os.close(reader)


def test_the_check_of_a_log_keeps_no_descriptor(tmp_path):
    check_usage_log(ServerConfig(served_model_names=("m",), usage_log=str(tmp_path / "log")))
    opened = [os.path.realpath(descriptor) for descriptor in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "log") not in opened
