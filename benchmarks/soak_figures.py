"""Records of a run of `soak.py`, and the figures and goals that follow from them."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from soak_processes import Kill, Sample
from soak_traffic import Request
from table import number

#: The polite tenant is alone for a quarter of every four minutes of ten: kills come at other times in each turn.
TURN, ALONE = 0.4, 0.25
GROWTH, RATE = 0.03, 0.5
UNKILLED_ROUTER = "router-2"
DETECTION_S = 10.0  # time after a kill in which its requests may still end
ORDINARY = frozenset({"finished", "cancelled", "rejected", "limited"})
FROM_ROUTER = frozenset({"cut", "no connection"})
#: Of the samples of five minutes, memory is their median. A leak of the others raises the least number.
FIGURES = {"private_bytes": statistics.median, "descriptors": min, "threads": min}


@dataclass
class Run:
    """Times are seconds of the monotonic clock. `names`: of servers by their addresses, as routers name replicas."""

    names: Mapping[str, str]
    seconds: float
    kill_every_s: float
    began_s: float
    requests: list[Request] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)  # gauges that should be 0 after the run
    num_counted: int = 0  # requests in the metrics of the router that is never killed

    def is_alone(self, at_s: float) -> bool:
        """Return whether the polite tenant is alone at a time."""
        turn_s = TURN * self.kill_every_s
        return (at_s - self.began_s) % turn_s < ALONE * turn_s

    def cause(self, request: Request) -> Kill | None:
        """Return the kill that explains an end, or None."""
        if request.end not in FROM_ROUTER and request.end != "error event":
            return None
        server = request.router if request.end in FROM_ROUTER else self.names.get(request.replica)
        for kill in self.kills:
            until_s = max(kill.ready_s, kill.at_s + DETECTION_S)
            if kill.server == server and request.began_s <= until_s and request.ended_s >= kill.at_s:
                return kill
        return None

    def faults(self) -> Iterator[Request]:
        """Yield requests of the polite tenant that were limited, and others whose end no kill explains."""
        for request in self.requests:
            is_refused = request.end == "limited" and request.tenant == "polite"
            if is_refused or (request.end not in ORDINARY and self.cause(request) is None):
                yield request

    def sent(self) -> tuple[int, int]:
        """Return the requests to the router that is never killed: without those whose client left, and all."""
        ends = [request.end for request in self.requests if request.router == UNKILLED_ROUTER]
        return len(ends) - ends.count("cancelled"), len(ends)

    def rate(self, tenant: str, *, alone: bool) -> float:
        """Return the requests per second of a tenant that were answered, while the polite one was alone or was not."""
        good = ORDINARY - {"limited"}
        ended = [each for each in self.requests if each.tenant == tenant and each.end in good]
        seconds = [self.began_s + second for second in range(int(self.seconds))]
        of_kind = sum(self.is_alone(at_s) == alone for at_s in seconds)
        return sum(self.is_alone(each.ended_s) == alone for each in ended) / max(1, of_kind)


@dataclass(frozen=True)
class Growth:
    """A figure of a process that is never killed, in an early part of the run and in the last one. Or, of a process
    that is killed, at the same age after its first and after its last restart."""

    process: str
    figure: str
    first: float
    last: float
    is_killed: bool

    @property
    def relative(self) -> float:
        return self.last / self.first - 1


def growths(run: Run) -> list[Growth]:
    found = []
    for process in sorted({each.process for each in run.samples}):
        own = [each for each in run.samples if each.process == process]
        is_killed = any(process.startswith(kill.server) for kill in run.kills)
        first, last = _of_equal_age(own, run.kill_every_s / 10) if is_killed else _early_and_late(own, run)
        if first and last:
            for figure, of in FIGURES.items():
                before, after = (float(of(getattr(each, figure) for each in part)) for part in (first, last))
                found.append(Growth(process, figure, before, after, is_killed))
    return found


def _early_and_late(samples: Sequence[Sample], run: Run) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Return the samples of the minutes 15 to 20 and 55 to 60 of an hour, or of the same parts of another run."""
    at = [((each.at_s - run.began_s) / run.seconds, each) for each in samples]
    return [each for part, each in at if 1 / 4 <= part < 1 / 3], [each for part, each in at if part >= 11 / 12]


def _of_equal_age(samples: Sequence[Sample], age_s: float) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Return three samples of this age, after the first and after the last restart of a process that lived so long."""
    lives: dict[int, list[Sample]] = {}
    for each in samples:
        if each.age_s >= age_s:
            lives.setdefault(each.pid, []).append(each)
    restarted = [life[:3] for life in lives.values()][1:]
    return (restarted[0], restarted[-1]) if len(restarted) > 1 else ([], [])


def judge(run: Run, grown: Sequence[Growth]) -> list[tuple[str, object, bool]]:
    """Return the goals, their figures, and whether they are met."""
    num_open = sum(each.end == "open" for each in run.requests)
    num_faults, num_left = sum(1 for _ in run.faults()), sum(each.num_left for each in run.kills)
    kept = run.rate("polite", alone=False) / (run.rate("polite", alone=True) or 1)
    fewest, most_sent = run.sent()
    rows: list[tuple[str, object, bool]] = [
        ("requests without an end", num_open, num_open == 0),
        ("requests that ended wrongly, or failed without a kill as the cause", num_faults, num_faults == 0),
        (
            f"requests that {UNKILLED_ROUTER} counted, of {fewest} that stayed and {most_sent} that were sent",
            run.num_counted,
            fewest <= run.num_counted <= most_sent,
        ),
        ("processes that outlived their server by 10 s", num_left, num_left == 0),
        ("gauges of idle servers that are not 0", len(run.busy), not run.busy),
        (f"part of its rate that the polite tenant keeps, at least {RATE:g}", number(kept), kept >= RATE),
    ]
    for figure in FIGURES:
        most = max((each.relative for each in grown if each.figure == figure and not each.is_killed), default=0.0)
        rows.append((f"largest growth of {figure}, at most {GROWTH:.0%}", f"{most:+.1%}", most <= GROWTH))
    return rows


def ends_by_kill(run: Run) -> list[tuple[str, ...]]:
    """Return a row per killed process: kills, median time until the server was ready, ends that they explain."""
    seen = Counter((kill.process, each.end) for each in run.requests if (kill := run.cause(each)) is not None)
    rows = []
    for process in dict.fromkeys(kill.process for kill in run.kills):
        own = [kill.ready_s - kill.at_s for kill in run.kills if kill.process == process]
        ends = (str(seen[process, end]) for end in (*sorted(FROM_ROUTER), "error event"))
        rows.append((process, str(len(own)), number(statistics.median(own)), *ends))
    return rows
