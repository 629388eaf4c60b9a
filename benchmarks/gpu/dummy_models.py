"""Models of known shapes with dummy weights, and timed generation from token ids by an engine core in this process."""

import json
import random
import time
from pathlib import Path
from typing import Any

from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.loop.start import start_core
from octavo_engine.process.parallel_executor import load_executor
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "max_position_embeddings": 4096}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 32,
}


def shape(
    architecture: str, hidden: int, width: int, layers: int, heads: tuple[int, int, int], vocab: int, **more: Any
) -> Any:
    """Return a `config.json`. `heads`: query heads, KV heads, size of a head."""
    return {
        **_COMMON,
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": architecture.lower(),
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        "tie_word_embeddings": architecture == "Qwen3",
        "torch_dtype": "bfloat16",
        **more,
    }


SHAPES = {
    "tiny-llama": shape("Llama", 64, 128, 2, (4, 2, 16), 512),
    "tiny-qwen3": shape("Qwen3", 64, 128, 2, (4, 1, 64), 512),
    "tiny-gemma2": shape("Gemma2", 64, 128, 2, (4, 2, 16), 512, **_GEMMA2),
    "Qwen3-0.6B": shape("Qwen3", 1024, 3072, 28, (16, 8, 128), 151936),
    "8-layers-dense": shape("Qwen3", 2048, 4 * 768, 8, (16, 4, 128), 32000, tie_word_embeddings=False),
    "8-layers-32-experts": shape("Qwen3Moe", 2048, 4 * 768, 8, (16, 4, 128), 32000, **_EXPERTS),
    "Llama-3-8B": shape("Llama", 4096, 14336, 32, (32, 8, 128), 128256),
}


def write_config(name: str, folder: Path) -> Path:
    """Write the shape's `config.json` below `folder`; return the model's folder."""
    model = folder / "models" / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[name]))
    return model


def open_engine(name: str, folder: Path, **settings: Any) -> tuple[EngineCore, ReadyInfo]:
    """Start an engine core with dummy weights of this shape; its `config.json` is written below `folder`."""
    config = EngineConfig(
        model=str(write_config(name, folder)), load_format="dummy", enable_prefix_caching=False, **settings
    )
    return start_core(config, load_executor)


def add_requests(core: EngineCore, sizes: list[tuple[int, int]], vocab: int, **sampling: Any) -> list[str]:
    """Add requests of (prompt tokens, output tokens), greedy unless `sampling` has parameters; return their ids."""
    draw = random.Random(0)
    for i, (num_in, num_out) in enumerate(sizes):
        params = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=num_out, ignore_eos=True)
        prompt = [draw.randrange(vocab) for _ in range(num_in)]
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    return [str(i) for i in range(len(sizes))]


def step(core: EngineCore, outputs: dict[str, list[int]]) -> None:
    """Run a step; append its tokens to `outputs`."""
    for out in core.step().outputs:
        if out.error is not None:
            raise RuntimeError(out.error.message)
        outputs[out.request_id] += out.token_ids


def generate(
    core: EngineCore, sizes: list[tuple[int, int]], vocab: int, *, most_s: float = float("inf"), **sampling: Any
) -> tuple[list[list[int]], float]:
    """Generate for (prompt tokens, output tokens) pairs at once; return the outputs and the seconds.

    After `most_s` seconds the core still has work.
    """
    outputs: dict[str, list[int]] = {request_id: [] for request_id in add_requests(core, sizes, vocab, **sampling)}
    began = time.perf_counter()
    while core.has_work() and time.perf_counter() - began < most_s:
        step(core, outputs)
    return list(outputs.values()), time.perf_counter() - began


def start_decoding(core: EngineCore, sizes: list[tuple[int, int]], vocab: int) -> None:
    """Add requests, and run steps until each has a token."""
    outputs: dict[str, list[int]] = {request_id: [] for request_id in add_requests(core, sizes, vocab)}
    while not all(outputs.values()):
        step(core, outputs)
