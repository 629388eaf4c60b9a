import asyncio
import json
import socket
from argparse import Namespace

import pytest
from octavo_server.cli import explain
from octavo_server.cli.main import build_parser
from octavo_server.client import api
from octavo_server.client.api import ApiClient, ApiFailure, Unreachable
from octavo_server.router.fleet.prefix_index import Match, PrefixIndex
from octavo_server.router.observe.debug import decision_info
from octavo_server.router.observe.decision_log import KEPT, DecisionLog
from octavo_server.router.observe.request_observer import RouterTelemetry
from octavo_testing.router_parts import PROMPT, decision, exact_replica


@pytest.fixture
def infos(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    telemetry = RouterTelemetry(clock=iter(range(1000)).__next__)
    index = PrefixIndex(max_entries=100)
    replicas = [exact_replica(f"pod-{letter}", index) for letter in "abc"]
    for number in range(2):
        observer = telemetry.observe(f"r-{number}")
        observer.model = "tiny"
        observer.record_decision(PROMPT, decision(*replicas), 0.00002)
        if number == 0:
            observer.record_first_byte(48)
            observer.record_end(200, "finished")
    return [decision_info(entry, 1e9, "w") for entry in telemetry.decisions.latest(10)][::-1]


def cells(line):
    return [cell for cell in line.split("  ") if cell.strip()]


def test_a_decision_has_a_row_and_one_for_each_candidate(infos):
    head, first, other, third, *_ = explain.Table(4).lines(infos)
    assert head.split()[:6] == ["time", "request", "model", "prompt", "rung", "replica"]
    row = dict(zip(explain.HEAD, (cell.strip() for cell in cells(first)), strict=True))
    assert (row["request"], row["prompt"], row["rung"], row["replica"]) == ("r-0", "100", "exact", "pod-a")
    assert (row["blocks"], row["cost"], row["prefill"], row["queue"]) == ("4", "13.0", "10.0", "2.0")
    assert (row["expected"], row["cached"], row["end"], row["why"]) == ("64", "48", "200 finished", "least cost")
    assert other.split()[:3] == ["pod-b", "0", "23.0"]
    assert third.split()[:3] == ["pod-c", "0", "33.0"]
    assert other.index("pod-b") == first.index("pod-a") == head.index("replica")


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (2, 3), (3, 3)])
def test_only_the_cheapest_of_many_candidates_are_shown(infos, most, rows):
    _, *lines = explain.Table(most).lines(infos[:1])
    assert len(lines) == rows
    assert ("(and 1 more)" in lines[-1]) == (most == 2)


def test_followed_rows_have_no_second_header(infos):
    table = explain.Table(1)
    head, _ = table.lines(infos[:1])
    (second,) = table.lines(infos[1:])
    assert second.index("pod-a") == head.index("replica")
    assert list(table.lines([])) == []


def test_blocks_show_their_tier(infos):
    candidate = infos[0].candidates[0]
    candidate.matched_blocks, candidate.host_blocks, candidate.predicted_blocks = 9, 2, 3
    assert explain._blocks(candidate) == "4+2 host+3 predicted"
    assert Match(9, 2, 3).device == 4


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:9/v1", "no server answers at http://127.0.0.1:9/v1 (Connection refused)"),
        ("http://nobody.invalid", "no server answers at http://nobody.invalid (Name or service not known)"),
    ],
)
def test_an_unreachable_router_is_reported_with_the_remedy(url, expected, capsys):
    args = Namespace(url=url, api_key=None, n=3, candidates=4, json=False, follow=False)
    assert explain.explain_decisions(args) == 1
    answer = capsys.readouterr().err
    assert expected in answer
    assert "octavo route" in answer


@pytest.mark.parametrize("as_json", [False, True])
def test_an_empty_decision_list_is_reported(as_json, monkeypatch, capsys):
    async def decisions(*_):
        return []

    monkeypatch.setattr(explain, "_decisions", decisions)
    args = Namespace(url="http://router:1/v1", api_key=None, n=3, candidates=4, json=as_json, follow=False)
    assert explain.explain_decisions(args) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "octavo: the router at http://router:1/v1 has sent no request to a replica yet.\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-n", "0"], "argument -n: '0' must be between 1 and 1000"),
        (
            ["-n", "-3"],
            "argument -n: '-3' is not a whole number (1024, 32k = 32000, 32K = 32768), and must be between 1 and 1000",
        ),
        (["-n", "1001"], "argument -n: '1001' must be between 1 and 1000"),
        (["--candidates", "0"], "argument --candidates: '0' must be at least 1"),
    ],
)
def test_numbers_that_a_router_refuses_are_refused_locally(flags, expected, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["explain", "decisions", *flags])
    assert expected in capsys.readouterr().err


async def test_a_hanging_router_times_out(monkeypatch):
    monkeypatch.setattr(api, "GET_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as sock:  # no task accepts connections
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with ApiClient(url) as asked:
            with pytest.raises(Unreachable, match=r"no server answers at .* \(timed out\)"):
                await asked.get(f"{url}/debug/decisions")


def test_a_server_that_is_no_router_is_reported_in_sentences(monkeypatch, capsys):
    async def decisions(*_):
        raise ApiFailure("HTTP 404: Not Found", 404)

    monkeypatch.setattr(explain, "_decisions", decisions)
    args = Namespace(url="http://engine:1", api_key=None, n=3, candidates=4, json=False, follow=False)
    assert explain.explain_decisions(args) == 1
    assert capsys.readouterr().err == (
        "octavo: HTTP 404: Not Found. "
        "Give the URL of a router with --url, with the port of --admin-port if the router has one.\n"
    )


def test_json_output_has_a_line_per_decision(infos, capsys):
    explain._print(infos, explain.Table(4), as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["request_id"] for line in lines] == ["r-0", "r-1"]
    assert len(lines[0]["candidates"]) == 3


def ended(telemetry, *numbers):
    for number in numbers:
        observer = telemetry.observe(f"r-{number}")
        observer.record_decision(PROMPT, decision(exact_replica("a", PrefixIndex(max_entries=100))), 0.0)
        observer.record_end(200, "finished")


def ended_decisions(telemetry, after=0):
    log = telemetry.decisions
    return [decision_info(e, telemetry.time_of(e.decided_s), log.worker) for e in log.ended_after(after)]


async def test_each_decision_is_followed_once(monkeypatch, capsys):
    """The router lists a decision only once, unless a worker hangs; then it may list it again."""
    monkeypatch.setattr(explain, "FOLLOW_EVERY_S", 0.0)
    telemetry, asked = RouterTelemetry(), []

    async def decisions(_, url):
        asked.append(url)
        if len(asked) > 4:
            raise asyncio.CancelledError
        ended(telemetry, len(asked))
        return ended_decisions(telemetry)

    monkeypatch.setattr(explain, "_decisions", decisions)
    args = Namespace(url="http://x", api_key=None, n=9, candidates=4, json=True, follow=True)
    with pytest.raises(asyncio.CancelledError):
        await explain._show(args)
    captured = capsys.readouterr()
    assert [json.loads(line)["request_id"] for line in captured.out.splitlines()] == ["r-1", "r-2", "r-3", "r-4"]
    assert captured.err == ""
    assert asked[0] == "http://x/debug/decisions/ended"
    assert asked[1] == f"http://x/debug/decisions/ended?after={telemetry.decisions.worker}%3A1"


async def test_following_starts_with_the_latest_decisions(monkeypatch, capsys):
    telemetry = RouterTelemetry()
    ended(telemetry, 1, 2, 3)
    answers = iter([ended_decisions(telemetry)])

    async def decisions(*_):
        try:
            return next(answers)
        except StopIteration:
            raise asyncio.CancelledError from None

    monkeypatch.setattr(explain, "_decisions", decisions)
    args = Namespace(url="http://x", api_key=None, n=2, candidates=4, json=True, follow=True)
    with pytest.raises(asyncio.CancelledError):
        await explain._show(args)
    assert [json.loads(line)["request_id"] for line in capsys.readouterr().out.splitlines()] == ["r-2", "r-3"]


def test_decisions_that_the_router_dropped_are_counted():
    workers = [RouterTelemetry(decisions=DecisionLog(3)) for _ in range(2)]
    position = explain.FollowPosition()
    for telemetry in workers:
        ended(telemetry, *range(5))
    new, num_lost = position.select_new([info for telemetry in workers for info in ended_decisions(telemetry)])
    assert (len(new), num_lost) == (6, 0)  # earlier decisions don't count as lost
    ended(workers[0], *range(5, 13))
    new, num_lost = position.select_new([info for telemetry in workers for info in ended_decisions(telemetry, after=5)])
    assert ([info.request_id for info in new], num_lost) == (["r-10", "r-11", "r-12"], 5)


async def test_dropped_decisions_are_reported_beside_the_rows(monkeypatch, capsys):
    monkeypatch.setattr(explain, "FOLLOW_EVERY_S", 0.0)
    telemetry, rounds = RouterTelemetry(decisions=DecisionLog(3)), iter([range(1), range(1, 9)])

    async def decisions(*_):
        numbers = next(rounds, None)
        if numbers is None:
            raise asyncio.CancelledError
        ended(telemetry, *numbers)
        return ended_decisions(telemetry)

    monkeypatch.setattr(explain, "_decisions", decisions)
    args = Namespace(url="http://x", api_key=None, n=9, candidates=4, json=True, follow=True)
    with pytest.raises(asyncio.CancelledError):
        await explain._show(args)
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 4
    assert "5 decisions are missing" in captured.err


def test_many_new_decisions_shorten_the_polling_interval():
    most_s = explain.FOLLOW_EVERY_S
    assert explain.next_wait_s(most_s, 0) == explain.next_wait_s(most_s, 10) == most_s
    assert explain.next_wait_s(most_s, 4 * explain.TARGET_BATCH) == most_s / 4
    assert explain.next_wait_s(most_s / 4, explain.TARGET_BATCH) == most_s / 4
    assert explain.next_wait_s(most_s / 4, 0) == most_s
    assert explain.TARGET_BATCH < KEPT / 2
