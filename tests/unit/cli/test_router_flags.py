"""Flags of `octavo route`: accepted values, and values that are refused at the start."""

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.main import build_parser
from octavo_server.cli.route_flags import settings_of
from octavo_testing.usage_errors import usage_error

URL = ("--replica", "http://a:1")


def parsed(*flags):
    return build_parser().parse_args(["route", *flags])


@pytest.mark.parametrize(
    "flags",
    [
        ("--replica", "http://a:1", "--replica", "http://b:1", "--replica", "http://c:1"),
        ("--replica", "http://a:1", "http://b:1", "http://c:1"),
        ("--replica", "http://a:1", "http://b:1", "--port", "80", "--replica", "http://c:1"),
    ],
    ids=["once for each", "one after the other", "both"],
)
def test_replicas_may_be_given_in_either_form(flags):
    assert parsed(*flags).replica == ["http://a:1", "http://b:1", "http://c:1"]


def test_a_config_file_may_list_several_replicas(tmp_path):
    file = tmp_path / "route.yaml"
    file.write_text("replica:\n  - http://a:1\n  - http://b:1\nmax-retries: 5\n")
    args = parsed("--config", str(file))
    assert (args.replica, args.max_retries) == (["http://a:1", "http://b:1"], 5)


@pytest.mark.parametrize(
    "flag", ["--workers", "--max-index-entries", "--max-requests-per-replica", "--breaker-failures"]
)
def test_numbers_below_the_minimum_are_refused(flag, capsys):
    assert f"argument {flag}: '0' must be at least 1" in usage_error(capsys, parsed, *URL, flag, "0")
    assert getattr(parsed(*URL, flag, "1"), flag.removeprefix("--").replace("-", "_")) == 1


@pytest.mark.parametrize("flag", ["--connect-timeout", "--first-byte-timeout", "--idle-timeout", "--service-interval"])
def test_times_of_zero_are_refused(flag, capsys):
    assert f"argument {flag}: '0' is too short" in usage_error(capsys, parsed, *URL, flag, "0")


def test_retries_queue_and_hold_time_may_be_zero():

    flags = ("--max-retries", "0", "--max-queued-reqs", "0", "--max-hold-time", "0")
    forward = settings_of(parsed(*URL, *flags)).forward
    assert (forward.max_retries, forward.max_queued_reqs, forward.max_hold_time) == (0, 0, 0.0)


@pytest.mark.parametrize(
    "flags", [("--port", "9", "--admin-port", "9"), ("--admin-port", "9", "--port", "9"), ("--admin-port", "8000")]
)
def test_two_ports_are_compared_after_both_are_read(flags):
    with pytest.raises(StartupError, match=r"--admin-port and --port are both (9|8000): give two"):
        settings_of(parsed(*URL, *flags))
    assert settings_of(parsed(*URL, "--port", "0", "--admin-port", "0")).admin_port == 0
