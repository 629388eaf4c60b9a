import re
from pathlib import Path

import octavo_server
import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.http_flags import http_settings_of
from octavo_server.cli.main import build_parser
from octavo_server.cli.observe_flags import observability_of
from octavo_server.cli.vllm_environment import KEEP_ALIVE_VARIABLE, SERVER_VARIABLES, unused_server_variables


def parse(*argv, command="serve"):
    return build_parser().parse_args([command, *argv])


def test_flags_set_the_fields():
    args = parse(
        *("--health-stall-timeout", "0", "--metrics-prefix", "my_engine:"),
        *("--enable-per-request-metrics", "--disable-access-log-for-endpoints", "/tokenize, /v1/models"),
    )
    assert observability_of(args) == {
        "unlogged_paths": ("/tokenize", "/v1/models"),
        "health_stall_timeout_s": 0.0,
        "metrics_prefix": "my_engine:",
        "enable_per_request_metrics": True,
    }


@pytest.mark.parametrize("command", ["serve", "route"])
def test_shared_flags_set_the_same_fields_in_both_commands(command):
    timeouts = ("--drain-timeout", "1", "--shutdown-delay", "2", "--keep-alive-timeout", "3")
    traces = ("--otlp-traces-endpoint", "http://x")
    logs = ("--log-format", "json", "--disable-uvicorn-access-log", "--uvicorn-log-level", "error")
    address = ("--host", "::1", "--port", "0", "--api-key", "k", "k")
    connections = ("--slow-client-timeout", "4", "--max-connections", "5")
    assert http_settings_of(parse(*timeouts, *traces, *logs, *address, *connections, command=command)) == {
        "host": "::1", "port": 0, "uvicorn_log_level": "error", "log_format": "json", "logs_access": False,
        "api_keys": ("k",), "api_key_files": (), "router_secrets": (), "router_secret_file": None,
        "otlp_traces_endpoint": "http://x", "allowed_hosts": (), "allowed_origins": (), "allowed_methods": ("*",),
        "allowed_headers": ("*",), "allow_credentials": False,
        "drain_timeout_s": 1.0, "shutdown_delay_s": 2.0, "keep_alive_s": 3, "slow_client_timeout_s": 4.0,
        "max_connections": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--health-stall-timeout", "-1"), "number of seconds"),
        (("--health-stall-timeout", "nan"), "number of seconds"),
        (("--metrics-prefix", "a-b:"), "'a-b:'"),
        (("--metrics-prefix", "1x"), "'1x'"),
        (("--log-format", "xml"), "invalid choice"),
    ],
)
def test_invalid_values_are_rejected(argv, message, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert message in capsys.readouterr().err


def test_variables_of_vllm_set_defaults(monkeypatch):
    monkeypatch.setenv(KEEP_ALIVE_VARIABLE, "5")
    assert http_settings_of(parse())["keep_alive_s"] == 5
    assert http_settings_of(parse("--keep-alive-timeout", "7"))["keep_alive_s"] == 7
    monkeypatch.setenv(KEEP_ALIVE_VARIABLE, "soon")
    with pytest.raises(StartupError, match=r"\$VLLM_HTTP_TIMEOUT_KEEP_ALIVE is 'soon'"):
        http_settings_of(parse())


def test_wrong_logging_level_is_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert unused_server_variables() == []
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(StartupError, match="is 'loud': set it to one of DEBUG, INFO"):
        unused_server_variables()


def test_every_variable_that_the_code_reads_counts_as_read():
    """The line about variables without effect must not name one that has an effect."""
    root = Path(octavo_server.__file__).parents[3]
    sources = [path.read_text() for area in ("engine", "server") for path in (root / area / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'"(VLLM_[A-Z0-9_]+)"', text)}
    assert read == SERVER_VARIABLES
