"""Messages between rank 0 and the processes of the other ranks survive the way."""

import os
import queue
from pathlib import Path

import zmq
from octavo_engine.devices.memory import HostMemory, MemoryInfo
from octavo_engine.process import rank_messages as messages
from octavo_engine.process.ipc_sockets import make_folder, remove_folder
from octavo_engine.process.messages import Failed, framed, read_message
from octavo_engine.process.parallel_executor import _without_grammars
from octavo_engine.process.rank_processes import RankProcess, Report, without_text
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.sampling import SamplingParams

PLAN = StepPlan(
    step_id=3,
    seqs=[
        SeqStep(seq_id=1, start=4, num_tokens=2, sample=True, block_ids=[[5, 6]], draft_token_ids=[7], logits_from=0)
    ],
    new_seqs=[
        NewSeq(
            seq_id=1,
            token_ids=[1, 2],
            num_prompt_tokens=2,
            params=SamplingParams(logit_bias={3: 0.5}),
            seed=2**63 + 1,
            grammar="root ::= x",
            pooling=PoolingParams(),
        )
    ],
    dropped_seqs=[9],
    swap_out=[(1, 2)],
    copies=[(3, 4)],
)


def test_plans_are_the_same_without_grammars() -> None:
    message = messages.decode_to_rank(messages.encode(messages.RunPlan(_without_grammars(PLAN))))
    assert isinstance(message, messages.RunPlan)
    received = message.plan
    assert received.new_seqs[0].grammar is None
    received.new_seqs[0].grammar = PLAN.new_seqs[0].grammar
    assert received == PLAN


def rank_start(folder: str) -> messages.RankStart:
    config = EngineConfig(model="m", tensor_parallel_size=2)
    return messages.RankStart(rank=1, config=config, folder=folder, parent_pid=os.getpid(), log_format="json")


def test_the_part_of_a_rank_has_the_files_of_rank_0() -> None:
    quantisation = QuantisedConfig(method="gptq", layout="gptq", bits=4, group_size=32, symmetric=True)
    files = ModelFiles(
        name="m",
        root=Path("/models/m"),
        load_format="safetensors",
        config={"rope": {"factor": 1.5}, "layers": [1, None]},
        weight_files=(Path("/models/m/a.safetensors"),),
        gguf=Path("/models/m/a.gguf"),
        quantisation=quantisation,
        tokenizer_config={"model_max_length": 10**30},  # as many checkpoints have it
    )
    part = messages.LoadPart(
        rank=1,
        config=EngineConfig(model="m", tensor_parallel_size=2),
        files=without_text(files),
        host=HostMemory(memory=MemoryInfo(total_bytes=2, available_bytes=1), kv_cache_memory_bytes=9),
        num_blocks=3,
        num_host_blocks=4,
        num_layers=(),
        address="127.0.0.1",
    )
    assert messages.decode_to_rank(messages.encode(part)) == part
    to_host = messages.decode_to_host(messages.encode(messages.LoadRank(part)))
    assert to_host == messages.LoadRank(part)


def test_the_start_of_a_rank_survives_the_way() -> None:
    start = rank_start("/tmp/o")
    assert messages.decode_start(messages.encode(start)) == start


def test_a_message_to_a_rank_that_is_gone_is_no_error_of_its_own() -> None:
    """Clients get the cause that the rank reports at its end, even if a message is sent to it meanwhile."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    folder = make_folder()
    rank = RankProcess(rank_start(folder), context.socket(zmq.PUSH), lambda *report: reports.put(report))
    try:
        rank.kill()
        assert reports.get(timeout=60) == (1, Failed("its process was killed by signal 9."))
        assert reports.get(timeout=60) == (1, None)
        rank.send(b"a plan")
    finally:
        rank.request_stop()
        rank.stop()
        rank.send(b"an entry")  # of another rank, which is stopped next
        context.destroy(linger=0)
        remove_folder(folder)


def test_a_pipe_yields_whole_messages_until_it_is_closed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source:
        with os.fdopen(writing, "wb") as target:
            target.write(framed(b"one") + framed(b"") + framed(b"three")[:-1])
        found = [read_message(source.fileno()) for _ in range(4)]
    assert found == [b"one", b"", None, None]
