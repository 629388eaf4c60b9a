"""Whole engines whose weights stay in groups, with the Triton kernels in the interpreter: their answers are those of
the expanded model, for each method and with two ranks, and graphs take these steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.devices.device import CpuDevice
from octavo_engine.layers.group_method import GroupMethod
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.runner.model_loading import load_model
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import stored_tensors
from octavo_engine.wire.errors import StartupError
from octavo_testing.decode_pairs import Pair
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.group_weights import groups_kept
from octavo_testing.late_nccl import late_nccl
from octavo_testing.paged import PagedDriver
from octavo_testing.quantised_tiny import METHODS, make_quantised
from octavo_testing.thread_ranks import ranks_on_gpu_stand_ins
from octavo_testing.tiny_models import make_tiny
from octavo_testing.triton_device import TritonGraphs, one_launch_at_a_time, triton_kernels

pytestmark = pytest.mark.slow

CHECKPOINTS = Path(__file__).parents[1] / "unit" / "weights" / "quantised_checkpoints"
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (25, 16, 3)]
#: Kernels and torch add products in different orders: log-probabilities of a float16 engine differ by up to 0.005.
NOISE = 0.01

#: The log-probabilities of the likeliest tokens, for each token of each answer.
Answers = list[list[dict[int, float]]]


def assert_equal(found: Answers, expected: Answers) -> None:
    """Compare answers as long as their tokens are equal. They may part only where two tokens are equally likely."""
    for ours, theirs in zip(found, expected, strict=True):
        for mine, reference in zip(ours, theirs, strict=True):
            token, likeliest = max(mine, key=mine.__getitem__), max(reference, key=reference.__getitem__)
            assert mine[token] == pytest.approx(reference[token], abs=NOISE)
            if token != likeliest:
                assert reference[token] == pytest.approx(reference[likeliest], abs=NOISE)
                break


def generate(model: Path, size: int = 1, **settings: Any) -> Answers:
    llm = LLM(
        str(model),
        dtype="float16",
        tensor_parallel_size=size,
        num_threads=size,
        max_num_batched_tokens=20,
        max_num_seqs=4,
        num_gpu_blocks_override=16,
        max_model_len=64,
        **settings,
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
        answers = []
        for each in llm.generate(PROMPTS, params, use_tqdm=False):
            logprobs = each.outputs[0].logprobs
            assert logprobs
            answers.append([{token: one.logprob for token, one in row.items()} for row in logprobs])
        return answers
    finally:
        llm.shutdown()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[GroupMethod]:
    """Return the layers in groups that are loaded from now on. The torch reference of their product must not run."""
    found: list[GroupMethod] = []
    pack = GroupMethod.pack

    def packed(self: GroupMethod) -> None:
        found.append(self)
        pack(self)

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was expanded by torch")

    monkeypatch.setattr(GroupMethod, "pack", packed)
    monkeypatch.setattr("octavo_engine.layers.group_method.expand_groups", refuse)
    return found


def quantised(method: str, folder: Path) -> Path:
    return make_quantised("llama", method, folder, group=32, block=(24, 32))[0]


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_the_expanded_model(method: str, loaded: list[GroupMethod], tmp_path: Path) -> None:
    folder = quantised(method, tmp_path)
    with triton_kernels():
        expected = generate(folder)
        assert not loaded
        with groups_kept():
            assert_equal(generate(folder), expected)
    assert len(loaded) == 16


def greedy(path: Path, group: Group | None = None) -> list[int]:
    """Return the likeliest token after each of a prompt."""
    files, device = resolve_model(str(path)), CpuDevice()
    config = EngineConfig(model=str(path), dtype="float16", num_gpu_blocks_override=20, max_model_len=64)
    model_config, stored = load_model_config(files), stored_tensors(files)
    model = load_model(
        *(device, files, model_config, plan_memory(config, device, model_config, stored, group=group)), group=group
    )
    backend = device.attention_backend(model.kv_specs(), config.block_size, torch.float16)
    logits = PagedDriver(model, block_size=config.block_size, backend=backend).feed({0: list(range(3, 14))})
    return logits[0].argmax(-1).tolist()


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0", "act_order"])
def test_tokens_of_gguf_and_act_order_are_those_of_the_expanded_model(
    qtype: str, loaded: list[GroupMethod], tmp_path: Path
) -> None:
    path = CHECKPOINTS / qtype if qtype == "act_order" else tmp_path / "m.gguf"
    if qtype != "act_order":
        write_tiny_gguf(path, "llama", tiny_model("llama"), qtype=qtype)
    with triton_kernels():
        expected = greedy(path)
        assert not loaded
        with groups_kept():
            assert greedy(path) == expected
    assert loaded
    assert all((each.order is not None) == (qtype == "act_order") for each in loaded)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_give_the_answers_of_the_expanded_model(
    method: str, loaded: list[GroupMethod], tmp_path: Path
) -> None:
    """Both add partial sums in fp16, which changes some logits by 0.02 beside those of one rank."""
    folder = quantised(method, tmp_path)
    with triton_kernels(), one_launch_at_a_time(), late_nccl(), ranks_on_gpu_stand_ins():
        expected = generate(folder, 2)
        assert not loaded
        with groups_kept():
            assert_equal(generate(folder, 2), expected)
    assert len(loaded) == 2 * 16


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_quantised_while_they_load_give_the_answers_of_the_reference(
    quantization: str, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path)
    with groups_kept():
        expected = generate(folder, quantization=quantization)
        with triton_kernels():
            assert_equal(generate(folder, quantization=quantization), expected)


def test_ranks_do_not_split_inputs_in_an_order_of_their_own() -> None:
    with triton_kernels(), groups_kept(), pytest.raises(StartupError, match=r"act-order.* cannot be split over"):
        greedy(CHECKPOINTS / "act_order", Group(0, 2))


@pytest.mark.parametrize("method", ["awq", "nf4"])
def test_graphs_take_steps_of_weights_in_groups(
    method: str, loaded: list[GroupMethod], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their logits equal those of eager steps."""
    folder = quantised(method, tmp_path)
    with triton_kernels(), groups_kept():
        pair = Pair.open(folder, device=TritonGraphs, dtype="float16", max_num_seqs=3)
        pair.mix_randomly(3, seed=2, most=3)
        assert loaded
        graphs = pair.recorded.device.graphed
        assert graphs is not None
        assert graphs._graphs
