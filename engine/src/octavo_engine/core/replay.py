"""Replays a trace: feeds the recorded inputs to a fresh scheduler, whose decisions must equal the recorded ones.

A replay needs no model and stops at the first decision that differs. An incomplete last line, left by a crash or a full
disk, ends the replay; any other unreadable line is an error that states the line's number.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.trace import TRACE_VERSION, decode_config, decode_request, encode_ended, encode_plan
from octavo_engine.wire.errors import OctavoError, StartupError
from octavo_engine.wire.plan import SeqResult, StepCosts, StepResult
from octavo_engine.wire.records import EngineStats, ErrorInfo, TokenLogprobs

Entry = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Divergence:
    line: int
    what: str
    recorded: object
    replayed: object


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """`num_lines`: lines replayed. `divergence`: the first decision that differs, if any."""

    num_lines: int = 0
    num_steps: int = 0
    num_requests: int = 0
    cut_off: bool = False
    divergence: Divergence | None = None
    stats: EngineStats | None = None

    @property
    def ok(self) -> bool:
        return self.divergence is None

    def __str__(self) -> str:
        counts = f"{self.num_steps} steps, {self.num_requests} requests, {self.num_lines} lines"
        tail = "; the last line is cut off" if self.cut_off else ""
        if self.divergence is None:
            return f"replayed {counts}: every decision is the same{tail}"
        d = self.divergence
        return f"replayed {counts}, then line {d.line}: {d.what}\n  recorded {d.recorded}\n  replayed {d.replayed}"


def replay_file(path: Path) -> ReplayReport:
    """Replay a file. Raises StartupError, which states the line, if the file is not a trace."""
    try:
        with path.open(encoding="utf-8") as lines:
            return replay(lines)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{path} is not a trace: it is not UTF-8 text.") from error


def replay(lines: Iterable[str]) -> ReplayReport:
    report = ReplayReport()
    scheduler: Scheduler | None = None
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            report.cut_off = True
            break
        try:
            entry = json.loads(line)
            if scheduler is None:
                scheduler = _open(entry)
            else:
                report.divergence = _replay_entry(scheduler, entry, number, report)
        except (ValueError, KeyError, TypeError, RecursionError, OctavoError) as error:
            raise StartupError(f"Line {number} of the trace can't be replayed: {error!r}.") from error
        report.num_lines = number
        if report.divergence:
            break
    if scheduler is None:
        raise StartupError("The trace is empty.")
    report.stats = scheduler.stats()
    return report


def _open(entry: Entry) -> Scheduler:
    if entry.get("trace") != TRACE_VERSION:
        raise ValueError(f"the trace has version {entry.get('trace')}; this release replays version {TRACE_VERSION}")
    return Scheduler(decode_config(entry["config"]))


def _replay_entry(scheduler: Scheduler, entry: Entry, line: int, report: ReplayReport) -> Divergence | None:
    if "add" in entry:
        report.num_requests += 1
        scheduler.add(decode_request(entry["add"]), entry["now"], deferred=entry.get("deferred", False))
        return None
    if "propose" in entry:
        scheduler.propose(entry["propose"], entry["tokens"])
        return None
    what, recorded, replayed = _decide(scheduler, entry, report)
    if recorded == replayed:
        return None
    return Divergence(line=line, what=what, recorded=recorded, replayed=replayed)


def _decide(scheduler: Scheduler, entry: Entry, report: ReplayReport) -> tuple[str, object, object]:
    """Replay an entry that holds a decision; return the decision's name, its recorded and its replayed value."""
    if "step" in entry:
        report.num_steps += 1
        plan = encode_plan(scheduler.step(entry["step"], StepCosts(**entry["costs"])))
        return _first_difference(entry["plan"], json.loads(json.dumps(plan)))
    if "commit" in entry:
        ended = encode_ended(scheduler.commit(_decode_result(entry), entry["now"]))
        return f"outputs that ended in step {entry['commit']}", entry["ended"], ended
    if "prepared" in entry:
        error = None if entry["error"] is None else ErrorInfo(entry["error"])
        ended = encode_ended(scheduler.prepared(entry["prepared"], entry["now"], error=error))
        return f"outputs that the preparation of {entry['prepared']} ended", entry["ended"], ended
    if "abort" in entry:
        ended = encode_ended(scheduler.abort(entry["abort"], entry["index"]))
        return f"outputs that the abort of {entry['abort']} ended", entry["ended"], ended
    if "fork" in entry:
        return "the id of a fork", entry["child"], scheduler.fork(entry["fork"])
    if "reset" in entry:
        return "whether the prefix cache was reset", entry["reset"], scheduler.reset_prefix_cache()
    raise ValueError(f"unknown entry {[*entry]}")


def _first_difference(recorded: Entry, replayed: Entry) -> tuple[str, object, object]:
    """Find the first part of the two plans that differs and, in a list, the first entry that differs."""
    for name in sorted({*recorded, *replayed}):
        left, right = recorded.get(name, []), replayed.get(name, [])
        if left == right:
            continue
        if isinstance(left, list) and isinstance(right, list):
            at = next(
                (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
            )
            where = f"plan of step {recorded['id']}: {name}[{at}]"
            return where, left[at] if at < len(left) else "nothing", right[at] if at < len(right) else "nothing"
        return f"plan of step {recorded['id']}: {name}", left, right
    return "plan", recorded, replayed


def _decode_result(entry: Entry) -> StepResult:
    seqs = [
        SeqResult(
            seq_id=seq_id,
            token_ids=tokens,
            prompt_logprobs=[TokenLogprobs([], [], 1)] * rows if rows else None,
            error=ErrorInfo(error[0]) if error else None,
        )
        for seq_id, tokens, rows, *error in entry["seqs"]
    ]
    return StepResult(step_id=entry["commit"], seqs=seqs, error=entry["error"])
