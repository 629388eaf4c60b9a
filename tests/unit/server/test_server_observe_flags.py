import pytest
from octavo_server.cli.main import build_parser
from octavo_server.cli.observe_flags import observability_of


def parse(*argv):
    return observability_of(build_parser().parse_args(["serve", *argv]))


def test_the_fields_are_those_given():
    fields = parse(
        *("--health-stall-timeout", "0", "--metrics-prefix", "my_engine:", "--log-format", "json"),
        *("--disable-uvicorn-access-log", "--enable-per-request-metrics", "--otlp-traces-endpoint", "http://x"),
    )
    assert fields == {
        "health_stall_timeout_s": 0.0,
        "metrics_prefix": "my_engine:",
        "log_format": "json",
        "logs_access": False,
        "enable_per_request_metrics": True,
        "otlp_traces_endpoint": "http://x",
    }


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--health-stall-timeout", "-1"), "no number of seconds"),
        (("--health-stall-timeout", "nan"), "no number of seconds"),
        (("--metrics-prefix", "a-b:"), "can't begin a metric's name"),
        (("--metrics-prefix", "1x"), "can't begin a metric's name"),
        (("--log-format", "xml"), "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(argv, told, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert told in capsys.readouterr().err
