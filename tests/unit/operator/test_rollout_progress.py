"""`octavo rollout status` ends with the rollout, and its exit code says how."""

from typing import Any

import pytest
from octavo_operator.explain.rollout import follow, progress_of


def _service(reason: str = "", status: str = "True", *, accepted: str = "True", seen: int = 2) -> dict[str, Any]:
    about = {"reason": "InvalidSpec", "message": "no such model"}
    progressing = {"type": "Progressing", "status": status, "reason": reason, "message": "new beside old"}
    conditions = [{"type": "Accepted", "status": accepted, **about}, *([progressing] if reason else [])]
    replicas = {"updated": 1, "desired": 3, "ready": 3}
    found = {"observedGeneration": seen, "conditions": conditions, "replicas": replicas}
    return {"metadata": {"name": "llm", "generation": 2}, "status": found}


ROLLING, COMPLETE = _service("RollingOut"), _service("Complete", "False")


@pytest.mark.parametrize(
    ("service", "has_ended", "text"),
    [
        ({"metadata": {"name": "llm", "generation": 1}}, None, "process the spec"),
        (_service("Complete", "False", seen=1), None, "process the spec"),
        (ROLLING, None, "1 of 3 replicas updated, 3 ready: RollingOut: new beside old"),
        (_service("Paused", "Unknown"), None, "Paused"),
        (COMPLETE, True, "successfully rolled out"),
        (_service("DeadlineExceeded", "False"), False, "DeadlineExceeded: new beside old"),
        (_service(accepted="False"), False, "InvalidSpec: no such model"),
    ],
)
def test_progress(service: dict[str, Any], has_ended: bool | None, text: str) -> None:
    found = progress_of(service)
    assert found.has_ended is has_ended
    assert text in found.text


def _follow(*services: dict[str, Any], **how: Any) -> tuple[int, float]:
    """The exit code, and the virtual time."""
    states, times = iter(services), [0.0]
    how = {"watch": True, "timeout_s": 0.0} | how
    code = follow(lambda: next(states), clock=lambda: sum(times), sleep=times.append, **how)
    return code, sum(times)


def test_each_change_is_printed_once_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert _follow(ROLLING, ROLLING, COMPLETE) == (0, 2.0)
    assert capsys.readouterr().out.splitlines() == [progress_of(each).text for each in (ROLLING, COMPLETE)]


def test_a_stopped_rollout_and_a_timeout_fail() -> None:
    assert _follow(ROLLING, _service("DeadlineExceeded", "False"))[0] == 1
    assert _follow(*[ROLLING] * 9, timeout_s=3.0) == (1, 3.0)


def test_without_watch_the_state_is_printed_once() -> None:
    assert _follow(ROLLING, watch=False) == (0, 0.0)
