"""The default of `max_step_ms`: a limit on a CPU, none elsewhere."""

from dataclasses import replace

import pytest
from octavo_engine.loop.start import CPU_MAX_STEP_MS, scheduler_config
from octavo_engine.settings.config import EngineConfig
from octavo_testing.scripted import ready_info


@pytest.mark.parametrize(
    ("device", "given", "limit_ms"),
    [("cpu", None, CPU_MAX_STEP_MS), ("cuda", None, 0.0), ("cpu", 0.0, 0.0), ("cuda", 50.0, 50.0)],
)
def test_steps_are_limited_on_a_cpu_unless_a_flag_says_otherwise(
    device: str, given: float | None, limit_ms: float
) -> None:
    ready = replace(ready_info(EngineConfig()), device=device)
    assert scheduler_config(EngineConfig(max_step_ms=given), ready).max_step_ms == limit_ms
