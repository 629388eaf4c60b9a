import stat
import tempfile
from pathlib import Path

import pytest
from octavo_engine.process import messages
from octavo_engine.process.ipc_sockets import from_core_address, make_folder, remove_folder, to_core_address
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.inspection import SequenceInfo
from octavo_engine.wire.records import (
    BlockLife,
    CoreOutputs,
    EngineRequest,
    EngineStats,
    SeqOutput,
    Timing,
    TokenLogprobs,
)
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.scripted import ready_info

REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    params=SamplingParams(
        n=2,
        stop=["a"],
        logit_bias={5: -1.5},
        allowed_token_ids=[1],
        bad_words_token_ids=[[1, 2]],
        seed=2**63 - 1,
        extra_args={"x": [1, {"y": None}]},
    ),
    eos_token_id=0,
)
OUTPUT = SeqOutput(
    request_id="r",
    token_ids=[7],
    logprobs=[TokenLogprobs([7, 8], [-0.5, float("-inf")], 1)],
    prompt_logprobs=[None, TokenLogprobs([1], [-1.0], 3)],
    finish_reason="stop",
    stop_reason="a",
    timing=Timing(queue_s=0.5),
)
SEQUENCE = SequenceInfo(
    request_id="r",
    indices=[0, 1],
    state="waiting",
    waiting_reason=None,
    prompt_tokens=3,
    generated_tokens=0,
    computed_tokens=0,
    cached_tokens=0,
    blocks=0,
    preemptions=0,
    priority=0,
    age_s=0.5,
    queued_s=0.5,
)


@pytest.mark.parametrize(
    "message",
    [
        messages.Add(REQUEST),
        messages.Abort("r", 1),
        messages.Abort("r"),
        messages.Call(7, "reset_prefix_cache"),
        messages.Call(8, "wake_up", ["weights", "kv_cache"]),
        messages.Stop(),
    ],
)
def test_messages_to_the_core_arrive_as_sent(message):
    assert messages.decode_to_core(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Hello(),
        messages.Failed("why", "OutOfMemory"),
        messages.Ready(ready_info(EngineConfig())),
        messages.Outputs(CoreOutputs(outputs=[OUTPUT], stats=EngineStats(running=1))),
        messages.Outputs(CoreOutputs(block_lives=[BlockLife(lifetime_s=2.5, idle_s=0.5, reuse_gaps_s=[1.0])])),
        messages.Answered(1, True),
        messages.Answered(2, [SEQUENCE]),
        messages.CallFailed(3, "why"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_from_the_core_arrive_as_sent(message):
    assert messages.decode_from_core(messages.encode(message)) == message


def test_the_start_message_arrives_as_sent():
    start = messages.Start(config=EngineConfig(seed=3), loader="m:f", folder="/tmp/x", parent_pid=1)
    assert messages.decode_start(messages.encode(start)) == start


def test_the_folder_is_private_and_its_paths_short(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "very-long-name/" * 10)
    folder = make_folder()
    try:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        for address in (to_core_address(folder), from_core_address(folder)):
            assert len(address.removeprefix("ipc://").encode()) <= 107
    finally:
        remove_folder(folder)
        remove_folder(folder)
    assert not Path(folder).exists()


def test_no_writable_temporary_folder_is_a_startup_error(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/absent")
    with pytest.raises(StartupError, match=r"absent.*TMPDIR"):
        make_folder()

    def without_candidates():
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", without_candidates)
    with pytest.raises(StartupError, match=r"No usable temporary directory.*TMPDIR"):
        make_folder()
