"""`octavo explain decisions`: a router's latest decisions as a table, oldest first, or as lines of JSON.

The first row of a decision is the chosen replica; the other candidates follow, cheapest first. Costs are milliseconds
to the first token; "delay" is the delay that the request causes for other requests. With --follow the router is polled
for decisions whose requests have ended since the last poll, more often if there are many. Decisions that the router
dropped between two polls are counted. `octavo explain infsvc` calls the operator's package, which reads the cluster and
explains conditions.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn
from urllib.parse import urlencode, urlsplit

import msgspec

from octavo_server.cli.chat_flags import key_of
from octavo_server.cli.plugins import operator_plugin
from octavo_server.client.api import ApiClient, ApiFailure, Unreachable, normalise_url
from octavo_server.config import ADMIN_SECRET_VARIABLE, SECRET_VARIABLE
from octavo_server.http.router_secret import SECRET_HEADER
from octavo_server.router.observe.debug import Candidate, DecisionInfo, Decisions

FOLLOW_EVERY_S = 0.5
#: Wanted number of decisions per poll; each worker of a router keeps only its latest 256 decisions.
TARGET_BATCH = 64
_HEAD = ("time", "request", "model", "prompt", "rung", "replica", "blocks", "cost", "prefill", "queue", "evict")
HEAD = (*_HEAD, "decode", "delay", "expected", "cached", "first byte", "end", "why")
_LEFT = frozenset({"time", "request", "model", "rung", "replica", "end", "why"})
_MAX_CHARS = 24


def explain_decisions(args: argparse.Namespace) -> int:
    try:
        asyncio.run(_show(args))
    except ApiFailure as error:
        print(f"octavo: {str(error).removesuffix('.')}.{_remedy(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if args.follow else 130
    return 0


async def _show(args: argparse.Namespace) -> None:
    url = urlsplit(normalise_url(args.url))._replace(path="/debug/decisions").geturl()
    table = Table(args.candidates)
    secret = os.environ.get(ADMIN_SECRET_VARIABLE) or os.environ.get(SECRET_VARIABLE)
    headers = {SECRET_HEADER: secret} if secret else {}
    async with ApiClient(args.url, key=key_of(args.api_key), headers=headers) as api:
        if args.follow:
            await _follow(args, api, url, table)
        decisions = (await _decisions(api, f"{url}?n={args.n}"))[::-1]
        if not decisions:
            print(f"octavo: the router at {args.url} has sent no request to a replica yet.", file=sys.stderr)
        _print(decisions, table, as_json=args.json)


async def _follow(args: argparse.Namespace, api: ApiClient, url: str, table: "Table") -> NoReturn:
    position, wait_s = FollowPosition(), FOLLOW_EVERY_S
    new, _ = position.select_new(await _decisions(api, f"{url}/ended"))
    _print(new[-args.n :], table, as_json=args.json)
    while True:
        await asyncio.sleep(wait_s)
        new, num_lost = position.select_new(await _decisions(api, f"{url}/ended?{position.query}"))
        if num_lost:
            why = "between two polls the router made more decisions than it keeps."
            print(f"octavo: {num_lost} decisions are missing here: {why}", file=sys.stderr)
        _print(new, table, as_json=args.json)
        wait_s = next_wait_s(wait_s, len(new))


class FollowPosition:
    """Number of the latest decision received from each worker of a router."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    @property
    def query(self) -> str:
        return urlencode([("after", f"{worker}:{number}") for worker, number in self._last.items()])

    def select_new(self, decisions: Sequence[DecisionInfo]) -> tuple[list[DecisionInfo], int]:
        """Return the new decisions, oldest first, and the number of decisions that the router dropped unseen."""
        new, num_lost = [], 0
        for info in decisions:
            last = self._last.get(info.worker, info.number - 1)
            if info.number > last:
                num_lost += info.number - last - 1
                self._last[info.worker] = info.number
                new.append(info)
        return sorted(new, key=lambda info: info.at_s), num_lost


def next_wait_s(waited_s: float, num_new: int) -> float:
    return min(FOLLOW_EVERY_S, waited_s * TARGET_BATCH / max(num_new, 1))


def _remedy(error: ApiFailure) -> str:
    if isinstance(error, Unreachable):
        return " Start a router with `octavo route`, or name another with --url."
    if error.status in (401, 403):
        secrets = f"${ADMIN_SECRET_VARIABLE} or ${SECRET_VARIABLE}"
        return f" Give the API key named `admin` with --api-key or $OPENAI_API_KEY, or set {secrets}."
    remedy = " Give the URL of a router with --url, with the port of --admin-port if the router has one."
    return remedy if error.status == 404 else ""


async def _decisions(api: ApiClient, url: str) -> list[DecisionInfo]:
    body = await api.get(url)
    try:
        return msgspec.json.decode(body, type=Decisions).decisions
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiFailure(f"{url} did not return decisions: {error}") from None


def _print(decisions: Sequence[DecisionInfo], table: "Table", *, as_json: bool) -> None:
    lines = (msgspec.json.encode(info).decode() for info in decisions) if as_json else table.lines(decisions)
    for line in lines:
        print(line)
    sys.stdout.flush()


class Table:
    """A table that is printed in parts: the header precedes the first rows, and columns only get wider."""

    def __init__(self, max_candidates: int) -> None:
        self._max_candidates = max_candidates
        self._widths: list[int] = []

    def lines(self, decisions: Sequence[DecisionInfo]) -> Iterator[str]:
        rows = [row for info in decisions for row in _rows(info, self._max_candidates)]
        if rows and not self._widths:
            rows.insert(0, HEAD)
            self._widths = [0] * len(HEAD)
        for row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for row in rows:
            cells = (_aligned(*cell) for cell in zip(HEAD, row, self._widths, strict=True))
            yield "  ".join(cells).rstrip()


def _rows(info: DecisionInfo, max_candidates: int) -> Iterator[tuple[str, ...]]:
    chosen, others = _ordered(info)
    cached = "" if info.cached_tokens is None else str(info.cached_tokens)
    first_byte = "" if info.ttft_s is None else f"{info.ttft_s * 1000:.0f}"
    yield (
        time.strftime("%H:%M:%S", time.localtime(info.at_s)),
        _cut(info.request_id) + (f" #{info.attempt}" if info.attempt > 1 else ""),
        _cut(info.model),
        str(info.prompt_tokens),
        info.rung,
        *(_cost_cells(chosen) if chosen is not None else (_cut(info.chosen), *[""] * 7)),
        str(info.expected_tokens),
        cached,
        first_byte,
        " ".join(str(part) for part in (info.code, info.ended) if part is not None),
        info.why,
    )
    for candidate in others[: max_candidates - 1]:
        yield (*[""] * 5, *_cost_cells(candidate), *[""] * 5)
    if len(others) > max(max_candidates - 1, 0) and max_candidates > 1:
        yield (*[""] * 5, f"(and {len(others) - max_candidates + 1} more)", *[""] * 12)


def _ordered(info: DecisionInfo) -> tuple[Candidate | None, list[Candidate]]:
    chosen = next((c for c in info.candidates if c.replica == info.chosen), None)
    return chosen, sorted((c for c in info.candidates if c is not chosen), key=lambda c: c.cost_s)


def _cost_cells(candidate: Candidate) -> tuple[str, ...]:
    c = candidate
    costs = (c.cost_s, c.prefill_s, c.queue_s, c.evict_s, c.decode_s, c.delay_s)
    return _cut(c.replica), _blocks(c), *(f"{cost * 1000:.1f}" for cost in costs)


def _blocks(candidate: Candidate) -> str:
    """Format the prompt's blocks in a replica's cache as "3+2 host+1 predicted": blocks on the device, blocks in host
    memory, and blocks that the router only predicts."""
    device = candidate.matched_blocks - candidate.host_blocks - candidate.predicted_blocks
    parts = [str(device)]
    if candidate.host_blocks:
        parts.append(f"{candidate.host_blocks} host")
    if candidate.predicted_blocks:
        parts.append(f"{candidate.predicted_blocks} predicted")
    return "+".join(parts)


def _aligned(name: str, cell: str, width: int) -> str:
    return f"{cell:<{width}}" if name in _LEFT else f"{cell:>{width}}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


def explain_infsvc(args: argparse.Namespace) -> int:
    if args.name is not None and args.all_namespaces:
        print("octavo: NAME and -A can't be combined: leave -A out, and give the namespace with -n.", file=sys.stderr)
        return 2
    explain = operator_plugin("explain", command="octavo explain infsvc")
    code: int = explain(
        args.name,
        namespace=args.namespace,
        all_namespaces=args.all_namespaces,
        kubeconfig=args.kubeconfig,
        context=args.context,
        as_json=args.output == "json",
    )
    return code
