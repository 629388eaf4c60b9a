"""The error that ends an engine reaches its other hosts, also if a script ends the engine without a reason."""

from typing import Any

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.wire.errors import EngineDead, InvalidRequest, StartupError
from octavo_engine.wire.records import EngineRequest
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids
from octavo_testing.simulation import sim_config


class FailingExecutor(ScriptedExecutor):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error, self.reasons = error, list[str | None]()

    def submit(self, plan: Any) -> Any:
        raise self._error

    def add_adapter(self, prepared: Any) -> None:
        raise self._error

    def release(self, tag: Any) -> None:
        raise self._error

    def shutdown(self, reason: str | None = None) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        *((call, EngineDead("rank 1 is late"), "rank 1 is late") for call in ("step", "adapter", "sleep")),
        ("sleep", AssertionError(), "AssertionError"),
    ],
)
def test_other_hosts_get_the_error_that_ended_the_engine_of_a_script(call: str, error: Exception, reason: str) -> None:
    """A script ends its engine without a reason, also after an error."""
    executor = FailingExecutor(error)
    core = EngineCore(Scheduler(sim_config()), executor)  # type: ignore[arg-type]
    core.add(EngineRequest(request_id="r", prompt_token_ids=text_ids("a"), params=scripted("b"), eos_token_id=EOS))
    calls = {"step": core.step, "adapter": lambda: core.load_adapter("x"), "sleep": lambda: core.call("sleep", ["kv"])}
    with pytest.raises(type(error)):
        calls[call]()
    core.shutdown()
    assert executor.reasons == [reason]


def test_a_refused_call_of_a_script_is_no_error_of_the_engine() -> None:
    executor = FailingExecutor(StartupError("no such adapter"))
    core = EngineCore(Scheduler(sim_config()), executor)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        core.load_adapter("x")
    core.shutdown()
    assert executor.reasons == [None]
