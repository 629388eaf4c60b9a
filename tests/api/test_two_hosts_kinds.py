"""Drafts, embeddings, adapters and sleep give the same answers on two hosts as on one, by tensors and by stages.

The first host is in the process of the test. With as many ranks and threads on one host, the same bits are expected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import octavo_engine.loop.proposers
import pytest
from octavo_engine import LLM, InvalidRequest, LoRARequest
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.parallel_llm import TEXTS, adapted_answers, answers, started
from octavo_testing.serve_command import free_port
from octavo_testing.tiny_models import make_tiny
from octavo_testing.two_hosts import SECRET, finish, headless, host_flags, places

pytestmark = pytest.mark.slow
EXACT = 12  # digits of log-probabilities
PRESSED = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "num_gpu_blocks_override": 8, "max_model_len": 96}
SWAPPING = PRESSED | {"swap_space": 0.01, "preemption_mode": "swap"}


class Hosts:
    """Starts one model on one host and on two. `sizes`: ranks of a stage, and stages; there are two ranks.

    `last_share`: of the KV cache, on the last rank; the last stage has three of the four layers of the tiny Llama.
    """

    def __init__(self, sizes: tuple[int, int], folder: Path) -> None:
        self._size, self._num_stages, self._log = *sizes, folder / "second"
        self.last_share = 1 / 2 if self._num_stages == 1 else 3 / 4

    @contextmanager
    def started(self, num_hosts: int, model: str, *flags: str, **settings: Any) -> Iterator[LLM]:
        """Start the model. `flags`: those that the second host must have like the first."""
        settings |= {"pipeline_parallel_size": self._num_stages}
        if num_hosts == 1:
            with started(model, self._size, **settings, num_threads=2) as llm:
                yield llm
            return
        port = free_port()
        sizes = ["--tensor-parallel-size", str(self._size), "--pipeline-parallel-size", str(self._num_stages)]
        with places("loopback") as (first, second):
            other = headless(second, host_flags(model, first, port, *sizes, *flags), self._log)
            where = {"nnodes": 2, "master_addr": first.address, "master_port": port}
            with started(model, self._size, **settings, **where, num_threads=1) as llm:
                yield llm
            finish(other, self._log)


@pytest.fixture(params=[(2, 1), (1, 2)], ids=["ranks", "stages"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("OCTAVO_GROUP_SECRET", SECRET)
    return Hosts(request.param, tmp_path)


@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_drafts_are_those_of_one_host(hosts: Hosts, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo_engine.loop.proposers, "least_share", lambda num_seqs, costs: 0.0)
    model = str(make_tiny("llama", tmp_path))
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafts = {"num_speculative_tokens": 4, **(ngram if kind == "ngram" else {"model": model})}
    found = []
    for num_hosts in (1, 2):
        with hosts.started(num_hosts, model, "--max-model-len", "96", speculative_config=drafts, **SWAPPING) as llm:
            found.append(answers(llm, TEXTS[:4], 24, digits=EXACT))
            assert llm.stats.preemptions_swap
            assert sum(llm.stats.accepted_draft_tokens) > 0
    assert found[1] == found[0]


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_embeddings_are_those_of_one_host(hosts: Hosts, kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": kind}, "max_model_len": 64}
    model, found = str(make_tiny("qwen3", tmp_path)), []
    for num_hosts in (1, 2):
        with hosts.started(num_hosts, model, "--max-model-len", "64", **settings) as llm:
            found.append([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
    assert found[1] == found[0]


def test_the_host_with_the_least_memory_decides_the_blocks(hosts: Hosts, tmp_path: Path) -> None:
    model, size = str(make_tiny("llama", tmp_path)), 100_000
    flags = "--max-model-len", "96", "--kv-cache-memory-bytes", str(size)
    with hosts.started(2, model, *flags, max_model_len=96, num_gpu_blocks_override=64) as llm:
        ready = llm.ready_info
        rank_bytes = int(ready.kv_bytes * hosts.last_share)
        assert 0 <= size - rank_bytes < rank_bytes // ready.num_blocks, "no further block fits"
        assert ready.num_blocks < 64
        found = answers(llm, TEXTS, 24, digits=EXACT)
    with hosts.started(1, model, max_model_len=96, num_gpu_blocks_override=ready.num_blocks) as llm:
        assert answers(llm, TEXTS, 24, digits=EXACT) == found


def test_adapters_load_leave_the_memory_and_sleep_as_on_one_host(hosts: Hosts, tmp_path: Path) -> None:
    """One adapter is loaded at the start, from another folder on each host, the others by requests."""
    model = str(make_tiny("llama", tmp_path))
    first, second, third = (write_adapter(tmp_path / str(seed), llama_pairs(seed=seed)) for seed in (1, 2, 3))
    copy = write_adapter(tmp_path / "copy", llama_pairs(seed=1))
    nowhere = {name.replace("layers.1.", "layers.4."): pair for name, pair in llama_pairs(seed=4).items()}
    wrong = write_adapter(tmp_path / "wrong", nowhere)
    settings = {"enable_lora": True, "max_loras": 2, "lora_modules": [f"first={first}"], "enable_sleep_mode": True}
    requests = [LoRARequest("first", 1, str(first)), None, LoRARequest("second", 2, str(second)), None]
    found = []
    for num_hosts in (1, 2):
        flags = "--enable-lora", "--max-model-len", "96", "--lora-modules", f"first={copy}"
        with hosts.started(num_hosts, model, *flags, max_model_len=96, **settings) as llm:
            adapted = adapted_answers(llm, requests)
            replaced = adapted_answers(llm, [LoRARequest("third", 3, str(third)), *requests[:3]])  # one more than fits
            with pytest.raises(InvalidRequest, match=r"changes the module 'model\.layers\.4\."):
                adapted_answers(llm, [LoRARequest("wrong", 4, str(wrong))] * 4)
            for level in (1, 2):
                llm.sleep(level=level)
                llm.wake_up()
                assert adapted_answers(llm, requests) == adapted
            base = adapted_answers(llm, [None] * 4)
            assert [a == b for a, b in zip(adapted, base, strict=True)] == [False, True, False, True]
            assert [a == b for a, b in zip(replaced, base, strict=True)] == [False, False, True, False]
            found.append((adapted, replaced))
    assert found[1] == found[0]
