"""Tiny embedding models, their texts, and transformers' vectors of these."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from octavo_engine import LLM
from octavo_engine.core.planner import Planner
from octavo_engine.wire.records import EngineStats
from transformers import AutoModel

from octavo_testing.tiny_models import VOCAB, byte_tokenizer, scramble, tiny_config, tiny_model

Vectors = npt.NDArray[np.float32]
LONGEST = 512


def make_embedder(name: str, path: Path, *, with_head: bool = True, **config: Any) -> Path:
    """Write a tiny model with a context of `LONGEST` tokens; `config`: further keys of its config.json."""
    if with_head:
        model = tiny_model(name)
    else:
        model = AutoModel.from_config(tiny_config(name)).eval().float()
        scramble(model, seed=0)
    model.config.max_position_embeddings = LONGEST
    model.save_pretrained(path)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stored | config))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@torch.no_grad()
def pooled_rows(path: Path, texts: list[list[int]], kind: str = "LAST") -> Vectors:
    """Return each text's last or first hidden row, or their mean, as transformers computes them in fp32."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    pool = {"LAST": lambda rows: rows[-1], "CLS": lambda rows: rows[0], "MEAN": lambda rows: rows.mean(0)}[kind]
    rows = [pool(model(torch.tensor([text])).last_hidden_state[0]) for text in texts]
    return np.stack([row.numpy() for row in rows])


def cosines(vectors: Vectors, expected: Vectors) -> npt.NDArray[np.float64]:
    a, b = vectors.astype(np.float64), expected.astype(np.float64)
    found: npt.NDArray[np.float64] = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return found


def draw_texts(count: int, *, longest: int) -> list[list[int]]:
    """Texts of 1 to `longest` tokens, most of which begin with one of three prefixes; the last five are repetitions."""
    draw = random.Random(5)
    prefixes = [[draw.randrange(3, VOCAB) for _ in range(longest // part)] for part in (12, 4, 2)]
    texts = [[7], [draw.randrange(3, VOCAB) for _ in range(longest)], prefixes[2]]
    while len(texts) < count - 5:
        prefix = draw.choice([*prefixes, []])
        texts.append([*prefix, *(draw.randrange(3, VOCAB) for _ in range(draw.randint(1, longest // 5)))])
    return texts + draw.sample(texts, 5)


def embed_under_pressure(path: Path, texts: list[list[int]], **settings: object) -> tuple[Vectors, EngineStats]:
    """Embed texts by `LLM` with a small budget and few blocks; check the outputs' order and the engine's counters."""
    sizes = {"max_num_batched_tokens": 96, "max_num_seqs": 16, "num_gpu_blocks_override": 50, "watermark": 0.0}
    llm = LLM(str(path), dtype="float32", debug_invariants=True, **sizes, **settings)
    outputs = llm.embed(texts, use_tqdm=False)
    stats = llm.stats
    llm.shutdown()
    assert [output.prompt_token_ids for output in outputs] == texts
    assert not any(output.error for output in outputs)
    assert stats.generation_tokens == stats.in_use_blocks == 0
    assert stats.prompt_tokens == sum(map(len, texts))
    return np.array([output.outputs.embedding for output in outputs], dtype=np.float32), stats


@contextmanager
def preemption_every(num_steps: int) -> Iterator[None]:
    """Preempt the latest sequence in each `num_steps`-th step, with a swap if there is a host tier. The engine itself
    does so only after a failed step, as a prompt gets all its blocks when it is admitted."""
    schedule = Planner._schedule_running

    def preempt_and_schedule(planner: Planner, budget: int) -> int:
        state = planner._state
        if state.running and planner._plan.step_id % num_steps == 0:
            state.preempt(state.running[-1], swap=state.kv.host is not None)
        return schedule(planner, budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "_schedule_running", preempt_and_schedule)
        yield
