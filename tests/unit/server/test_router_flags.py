"""Flags of `octavo route`: accepted values, and rejection at the start of values with which nothing could work."""

import pytest
from octavo_server.cli.main import build_parser
from octavo_server.cli.route_flags import settings_of

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
def test_replicas_may_be_listed_in_either_form(flags):
    assert parsed(*flags).replica == ["http://a:1", "http://b:1", "http://c:1"]


def test_config_file_lists_several_replicas(tmp_path):
    file = tmp_path / "route.yaml"
    file.write_text("replica:\n  - http://a:1\n  - http://b:1\nmax-retries: 5\n")
    args = parsed("--config", str(file))
    assert (args.replica, args.max_retries) == (["http://a:1", "http://b:1"], 5)


@pytest.mark.parametrize(
    "flag", ["--workers", "--max-index-entries", "--max-requests-per-replica", "--breaker-failures"]
)
def test_zero_is_rejected_where_at_least_one_is_needed(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(*URL, flag, "0")
    assert caught.value.code == 2
    assert f"argument {flag}: '0' is too small" in capsys.readouterr().err
    assert getattr(parsed(*URL, flag, "1"), flag.removeprefix("--").replace("-", "_")) == 1


@pytest.mark.parametrize("flag", ["--connect-timeout", "--first-byte-timeout", "--idle-timeout", "--service-interval"])
def test_timeout_of_zero_is_rejected(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(*URL, flag, "0")
    assert caught.value.code == 2
    assert f"argument {flag}: '0' is too short" in capsys.readouterr().err


def test_optional_limits_may_be_zero():
    """Zero means no retry, no queue and no waiting."""
    flags = ("--max-retries", "0", "--max-queued-reqs", "0", "--max-hold-time", "0")
    forward = settings_of(parsed(*URL, *flags)).forward
    assert (forward.max_retries, forward.max_queued_requests, forward.max_hold_s) == (0, 0, 0.0)
