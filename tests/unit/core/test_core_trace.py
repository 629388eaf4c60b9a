"""A trace replays to the same decisions without a model, and a replay reports the first difference."""

import json
from pathlib import Path

import pytest
from octavo_engine.core.replay import replay, replay_file
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.loop.proposers import NgramProposer
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import StepCosts
from octavo_testing.simulation import Simulation, sim_config


def traced(*, proposer: NgramProposer | None = None, **config: object) -> tuple[Simulation, list[str]]:
    lines: list[str] = []
    sim = Simulation(scheduler=TracingScheduler(sim_config(**config), lines.append), proposer=proposer)
    sim.costs = StepCosts(prefill_token_s=0.001, swap_block_s=0.0005)
    return sim, lines


def record_all_events(**config: object) -> list[str]:
    """Record a trace with pressure, swaps, forks, drafts, aborts, a failed step, prompt logprobs and a reset."""
    sim, lines = traced(**({"num_blocks": 10, "num_host_blocks": 4} | config))
    for i in range(14):
        sim.add(f"r{i}", [i % 4] * (6 + i), max_tokens=8, n=1 + i % 3, prompt_logprobs=1 if i % 5 == 0 else None)
        sim.tick()
    sim.fork(next(seq for seq in sim.live if len(seq.indices) == 1))
    sim.abort("r3", 0)
    sim.abort("r4")
    sim.step()
    sim.commit(error="lost")
    for _ in range(4):
        sim.tick()
        if sim.live:
            sim.scheduler.propose(sim.live[0].seq_id, [1, 2])
    sim.drain(depth=2)
    sim.scheduler.reset_prefix_cache()
    sim.verify()
    return lines


@pytest.mark.parametrize(
    "config", [{}, {"policy": "priority"}, {"enable_prefix_caching": False}, {"num_host_blocks": 0}, {"steps_ahead": 1}]
)
def test_a_replay_repeats_every_decision(config: dict[str, object]) -> None:
    lines = record_all_events(**config)
    report = replay(lines)
    assert report.ok, str(report)
    assert (report.num_lines, report.num_requests, report.cut_off) == (len(lines), 14, False)
    assert report.num_steps > 30
    assert "every decision is the same" in str(report)
    assert report.stats is not None
    assert report.stats.preemptions > 0


def test_a_replay_repeats_drafts_without_a_proposer() -> None:
    """A proposer also decides by measured costs, so its drafts are inputs of the trace."""
    proposer = NgramProposer(SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=1, prompt_lookup_min=1))
    sim, lines = traced(proposer=proposer, num_blocks=12, num_host_blocks=4)
    for i in range(8):
        sim.add(f"r{i}", [*range(i, 30)], max_tokens=12, n=1 + i % 2)
        sim.tick()
        sim.costs = StepCosts(prefill_token_s=0.001 * (i % 3), step_s=0.01)
    sim.drain()
    sim.verify()
    report = replay(lines)
    assert report.ok, str(report)
    assert report.stats is not None
    assert report.stats.draft_tokens > 20
    assert report.stats.preemptions > 0


def test_all_request_fields_survive_a_trace() -> None:
    sim, lines = traced()
    sim.add(
        "r", [1, 2], temperature=0.0, seed=None, logit_bias={1: 2.0}, stop=["x"], stop_token_ids=[7], salt="s", eos=3
    )
    sim.drain()
    assert replay(lines).ok


def with_last_entry_changed(lines: list[str], key: str, change: object) -> list[str]:
    """Return the trace with its last entry of a kind changed."""
    at = max(i for i, line in enumerate(lines) if key in json.loads(line))
    entry = json.loads(lines[at])
    change(entry)  # type: ignore[operator]
    return [*lines[:at], json.dumps(entry) + "\n", *lines[at + 1 :]]


@pytest.mark.parametrize(
    ("key", "change", "what"),
    [
        ("step", lambda e: e["plan"].update(copy=[[1, 2]]), "copy[0]"),
        ("step", lambda e: e["plan"].update(id=1), "id"),
        ("commit", lambda e: e.update(ended=[]), "outputs that ended in step"),
        ("abort", lambda e: e.update(ended=[]), "abort of r4"),
        ("fork", lambda e: e.update(child=1), "fork"),
        ("reset", lambda e: e.update(reset=False), "reset"),
    ],
)
def test_the_first_divergence_is_named(key: str, change: object, what: str) -> None:
    lines = record_all_events()
    report = replay(with_last_entry_changed(lines, key, change))
    assert not report.ok
    assert what in str(report)
    assert report.divergence is not None
    assert f"line {report.divergence.line}" in str(report)


def test_other_costs_change_decisions() -> None:
    sim, lines = traced(num_blocks=8, num_host_blocks=8)
    for i in range(3):
        sim.add(f"r{i}", [i] * 8, max_tokens=12)
    sim.drain()
    assert sim.scheduler.stats().preemptions_swap > 0
    dear = [line.replace('"swap_block_s":0.0005', '"swap_block_s":9.0') for line in lines]
    report = replay(dear)
    assert not report.ok
    assert "plan of step" in str(report)


def test_a_cut_off_last_line_ends_the_replay(tmp_path: Path) -> None:
    lines = record_all_events()
    path = tmp_path / "trace"
    path.write_text("".join(lines)[:-10])
    report = replay_file(path)
    assert report.ok
    assert report.cut_off
    assert report.num_lines == len(lines) - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("hello\n", "Line 1"),
        ('{"trace":1}\n', "the trace has version 1; this release replays version 2"),
        ('{"trace":2,"config":{"nonsense":1,"hash_root":""}}\n', "nonsense"),
    ],
)
def test_a_file_that_is_not_a_trace_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(StartupError, match=message):
        replay_file(path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(record_all_events()[0] + '{"what":1}\n')
    with pytest.raises(StartupError, match="Line 2"):
        replay_file(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(StartupError, match="UTF-8"):
        replay_file(path)
    with pytest.raises(StartupError, match="No such file"):
        replay_file(tmp_path / "absent")
