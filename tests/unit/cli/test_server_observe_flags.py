import re
from pathlib import Path

import octavo_server
import pytest
from octavo_engine.settings.declare import all_settings
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.declared_flags import from_environment, record_of
from octavo_server.cli.main import build_parser
from octavo_server.cli.vllm_flags import READY_TIMEOUT, SERVER_VARIABLES, unused_server_variables
from octavo_server.config import HttpSettings, ServerConfig
from octavo_server.router.settings import RouterSettings


def parse(*argv, command="serve"):
    return build_parser().parse_args([command, *argv])


def server(*argv):
    return record_of(ServerConfig, parse(*argv), served_model_names=("m",))


def test_flags_set_the_fields():
    config = server(
        *("--health-stall-timeout", "0", "--metrics-prefix", "my_engine:"),
        *("--enable-per-request-metrics", "--disable-access-log-for-endpoints", "/tokenize, /v1/models"),
    )
    assert config == ServerConfig(
        served_model_names=("m",),
        disable_access_log_for_endpoints=("/tokenize", "/v1/models"),
        health_stall_timeout=0.0,
        metrics_prefix="my_engine:",
        enable_per_request_metrics=True,
    )


@pytest.mark.parametrize(("command", "record"), [("serve", ServerConfig), ("route", RouterSettings)])
def test_shared_flags_set_the_same_fields_in_both_commands(command, record):
    timeouts = ("--drain-timeout", "1", "--shutdown-delay", "2", "--keep-alive-timeout", "3")
    traces = ("--otlp-traces-endpoint", "http://x")
    logs = ("--log-format", "json", "--disable-uvicorn-access-log", "--uvicorn-log-level", "error")
    address = ("--host", "::1", "--port", "0", "--api-key", "k", "k")
    connections = ("--slow-client-timeout", "4", "--max-connections", "5")
    args = parse(*timeouts, *traces, *logs, *address, *connections, command=command)
    assert record_of(HttpSettings, args) == HttpSettings(
        host="::1", port=0, uvicorn_log_level="error", log_format="json", disable_uvicorn_access_log=True,
        api_key=("k",), otlp_traces_endpoint="http://x", drain_timeout=1.0, shutdown_delay=2.0, keep_alive_timeout=3,
        slow_client_timeout=4.0, max_connections=5,
    )  # fmt: skip
    shared, declared = {s.name for s in all_settings(HttpSettings)}, {s.name for s in all_settings(record)}
    assert shared < declared


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
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")
    assert server().keep_alive_timeout == 5
    assert server("--keep-alive-timeout", "7").keep_alive_timeout == 7
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "soon")
    with pytest.raises(StartupError, match=r"\$VLLM_HTTP_TIMEOUT_KEEP_ALIVE is 'soon': .*unset"):
        server()


def test_wrong_logging_level_is_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert unused_server_variables() == []
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(StartupError, match="is 'loud': set it to one of DEBUG, INFO"):
        unused_server_variables()


def test_the_ready_timeout_is_a_number_of_seconds(monkeypatch):
    for text, timeout_s in (("", None), ("0", 0), ("2.5", 2.5)):
        monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", text)
        assert from_environment(READY_TIMEOUT) == timeout_s
    for text in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", text)
        with pytest.raises(StartupError, match=rf"\$VLLM_ENGINE_READY_TIMEOUT_S is '{text}'.*unset"):
            from_environment(READY_TIMEOUT)


def test_every_variable_that_the_code_reads_counts_as_read():
    """The line about variables without effect must not name one that has an effect."""
    root = Path(octavo_server.__file__).parents[3]
    sources = [path.read_text() for area in ("engine", "server") for path in (root / area / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'"(VLLM_[A-Z0-9_]+)"', text)}
    assert read == SERVER_VARIABLES
