"""The values of docs/reference/limits.md are those of the code: --update-golden writes the tables."""

import dataclasses
from pathlib import Path

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.declare import all_settings
from octavo_engine.text import template, template_meter
from octavo_engine.wire import sampling
from octavo_operator.cluster import reports, router_state
from octavo_server.api.admission import TENANT_FRACTION as QUEUE_FRACTION
from octavo_server.config import HttpSettings, QueueLimits, RequestLimits
from octavo_server.http import body, request_framing, timeout_protocol
from octavo_server.openai import limits
from octavo_server.router.settings import ForwardLimits, RouterSettings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "limits.md"
BEGIN = "written by pytest tests/unit/cli/test_docs_limits.py --update-golden -->\n"
KIB, MIB = 2**10, 2**20
HTTP = HttpSettings()
CLOSED = "408, and the connection is closed"
ANSWERS = {
    "max_request_bytes": "413",
    "request_timeout": CLOSED,
    "min_upload_rate": CLOSED,
    "max_num_queued_reqs": "429 with `Retry-After`; 400 for a request that alone exceeds it",
    "max_queue_time": "503",
}

ROUTER_ANSWERS = {
    "connect_timeout": "sent to another one",
    "first_byte_timeout": "504",
    "idle_timeout": "504, or an error event",
    "max_retries": "the last answer",
    "max_requests_per_replica": "the request waits",
    "max_queued_reqs": "429; a tenant gets half",
    "max_hold_time": "503",
    "breaker_failures": "sent to another one",
}


def number(value: float | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, int) and value >= 64 * KIB and value % KIB == 0:
        return f"{value // MIB} Mi" if value % MIB == 0 else f"{value // KIB} Ki"
    return f"{value:,}".replace(",", " ").removesuffix(".0")


def flag(field: str) -> str:
    return f"`--{field.replace('_', '-')}`"


def described(text: str) -> str:
    text = text.rstrip(".").removesuffix("; accepts 32M").removeprefix("Largest number of ").removeprefix("Largest ")
    return text[0].lower() + text[1:] if text[1].islower() else text


REQUEST_ROWS = [
    (
        described(declared.text),
        flag(declared.name),
        declared.unset if declared.default is None else number(declared.default),
        ANSWERS.get(declared.name, "400"),
    )
    for declared in all_settings(RequestLimits)
] + [
    (described(declared.text), flag(declared.name), number(float(declared.default)), "400")
    for declared in all_settings(EngineConfig)
    if declared.name == "max_image_pixels"
]
FIXED_ROWS = [
    ("bytes of URL and headers", number(request_framing.MAX_HEAD_BYTES), "431"),
    ("headers", number(request_framing.MAX_HEADERS), "431"),
    ("bytes of trailers", number(request_framing.MAX_TRAILER_BYTES), "400"),
    ("seconds for the headers; `--request-timeout` if that is less", number(timeout_protocol.HEAD_TIMEOUT_S), CLOSED),
    (
        "seconds in which a connection waits for the rest of a body that is answered already",
        number(timeout_protocol.LINGER_S),
        "`Connection: close`",
    ),
    ("fields of a body", number(limits.MAX_FIELDS), "400"),
    (
        "`logprobs`, or entries of `logprob_token_ids`, times sequences times output tokens, "
        "plus `prompt_logprobs` times prompt tokens",
        number(limits.MAX_LOGPROBS),
        "400",
    ),
    ("entries of `logprob_token_ids`", number(sampling.MAX_LOGPROB_TOKEN_IDS), "400"),
    ("seconds of CPU time of a chat template", number(template_meter.MAX_CPU_S), "400"),
    ("steps of a chat template", number(template_meter.MAX_STEPS), "400"),
    ("bytes of a chat template's values", number(template_meter.MAX_BYTES), "400"),
    ("characters that a chat template writes", number(template.MAX_CHARS), "400"),
]
SERVER_ROWS = [
    (
        "connections of a process",
        "`--max-connections`",
        number(HTTP.max_connections),
        "",
        "the connection that has been without a request for longest is closed",
    ),
    (
        "seconds of a connection without a request",
        "`--keep-alive-timeout`",
        number(HTTP.keep_alive_timeout),
        "",
        "closed",
    ),
    (
        "seconds in which a client reads nothing",
        "`--slow-client-timeout`",
        number(HTTP.slow_client_timeout),
        "",
        "disconnected",
    ),
    (
        "bytes of all bodies in memory, and of answers that are not streamed",
        "`--max-body-memory`",
        number(HTTP.max_body_memory),
        f"{body.TENANT_FRACTION:g}",
        "503; 429 beyond the share; 400 for one answer that never fits",
    ),
    *(
        (
            described(declared.text),
            flag(declared.name),
            number(declared.default),
            f"{QUEUE_FRACTION:g}" if declared.name == "max_num_queued_reqs" else "",
            ANSWERS.get(declared.name, "429 with `Retry-After`"),
        )
        for declared in all_settings(QueueLimits)
    ),
]
ROUTER_ROWS = [
    (described(declared.text), flag(declared.name), number(declared.default), ROUTER_ANSWERS.get(declared.name, ""))
    for declared in all_settings(ForwardLimits)
] + [
    (
        "entries of the prefix index",
        "`--max-index-entries`",
        number(RouterSettings().max_index_entries),
        "the older half is dropped",
    ),
]
OPERATOR_ROWS = [
    ("bytes of an event", number(reports.LONGEST_EVENT)),
    ("events a second; a large event counts as several", number(reports.MAX_EVENTS_S)),
    ("names of pods and models", number(router_state.MAX_NAMES)),
    ("seconds of silence", number(reports.SILENCE_S)),
]
TABLES = {
    "request": (("limit", "flag", "default", "answer"), REQUEST_ROWS),
    "fixed": (("limit", "value", "answer"), FIXED_ROWS),
    "server": (("limit", "flag", "default", "shared", "beyond it"), SERVER_ROWS),
    "router": (("limit", "flag", "default", "beyond it"), ROUTER_ROWS),
    "operator": (("limit", "value"), OPERATOR_ROWS),
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))


def test_the_tables_are_those_of_the_code(golden):
    text = PAGE.read_text()
    for name, (head, rows) in TABLES.items():
        begin, end = f"<!-- {name}: {BEGIN}", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{table(head, rows)}{end}{rest.partition(end)[2]}"
    golden(str(PAGE), text)


@pytest.mark.parametrize("settings", [RequestLimits, QueueLimits, ForwardLimits])
def test_every_limit_with_a_flag_is_listed(settings):
    listed = {row[1] for rows in (REQUEST_ROWS, SERVER_ROWS, ROUTER_ROWS) for row in rows}
    assert {flag(field.name) for field in dataclasses.fields(settings)} <= listed
