"""Run every causal model class of transformers, tiny and random, by the engine; print a table of form, result, reason.

`equal`: the engine's logits are those of transformers. `refused`: the start ends with one line that names the
architecture. `not built`: no tiny model could be made, and the class is not refused. `wrong`: anything else; the
script then exits with 1. It needs an engine with transformers:

    python tools/model_forms.py [--part 1/8] [MODEL_TYPE ...]
"""

import argparse
import gc
import json
import logging
import math
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from octavo_engine import LLM, SamplingParams
from octavo_engine.loop.start import find_capacity
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_LOGGER = logging.getLogger(__name__)
VOCAB, LENGTH, NUM_OUTPUT, NUM_LAYERS = 259, 56, 6, 4
PROMPTS = (list(range(20, 60)), list(range(90, 103)))
SECONDS_PER_FORM = 90
MOST_WEIGHTS = 20_000_000
#: Largest |Δlogit| relative to the standard deviation of all logits; of fp32 sums in another order.
TOLERANCE = 1e-3
#: Sizes of a tiny model by the usual name of a key of its config, then by a pattern of any other key.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 19,
    "kv_lora_rank": 24,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "window_size": 19,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_window_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PATTERNS: tuple[tuple[str, int], ...] = (
    (r"experts_per_tok|top_?k$|experts_top_k", 2),
    (r"shared_experts", 1),
    (r"experts$", 8),
    (r"(intermediate|ffn|inner|mlp|feed_forward|feedforward).*(size|dim)|ffn_dim|n_inner", 96),
    (r"(hidden|embedding|embed|projection).*(size|dim)$|^d_model$", 64),
    (r"layers$|^depth$", NUM_LAYERS),
    (r"heads$", 4),
    (r"d_head|head_size|head_dim$", 16),
    (r"^d_inner$", 96),
    (r"vocab_size", VOCAB),
    (r"(token|start)_(id|index)$", 5),
)
#: Sizes of further attempts, None for the size that the class derives.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"head_dim": None, "num_key_value_heads": 4},
    {"head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 40},
    {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    {"num_kv_shared_layers": NUM_LAYERS // 2},
)


def forms() -> list[tuple[str, str]]:
    """List (model type, class): what `AutoModelForCausalLM` maps, and further classes of that kind."""
    mapped = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    names = {name for _, name in mapped} | {"AutoModelForCausalLM"}
    endings = ("ForCausalLM", "LMHeadModel", "LMHead")
    further = [name for name in dir(transformers) if name.endswith(endings) and name not in names]
    return sorted([*mapped, *((getattr(transformers, name).config_class.model_type, name) for name in further)])


def shrink(config: PreTrainedConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a tiny config of the same class. `sizes`: by the usual names of keys, before `SIZES`."""
    usual = {ours: name for name, ours in config.attribute_map.items()}
    values = config.to_dict()
    num_layers = getattr(config, "num_hidden_layers", None)
    small: dict[str, Any] = {}
    for key, value in values.items():
        own, name = getattr(config, key, None) if key.endswith("config") else None, usual.get(key, key)
        if isinstance(own, PreTrainedConfig):
            small[key] = shrink(own, sizes)
        elif isinstance(value, list) and len(value) == num_layers:
            kinds = list(dict.fromkeys(map(str, value)))
            small[key] = [value[list(map(str, value)).index(kinds[i % len(kinds)])] for i in range(NUM_LAYERS)]
        elif name in sizes:
            small[key] = sizes[name]
        else:
            small[key] = _small(key if key in SIZES else name, value)
    if small.get("num_key_value_heads") and small["num_key_value_heads"] == values.get("num_attention_heads"):
        small["num_key_value_heads"] = SIZES["num_attention_heads"]
    return {key: value for key, value in small.items() if value is not None or values[key] is None}


def _small(key: str, value: Any) -> Any:
    if key in SIZES and (type(value) is int or (value is None and key.endswith(("token_id", "_group")))):
        return SIZES[key]
    if type(value) is int:
        return next((min(value, size) for pattern, size in PATTERNS if re.search(pattern, key)), value)
    return value


def tiny_model(family: type[PreTrainedModel]) -> PreTrainedModel:
    """Build a random model. Raises RuntimeError with the last attempt's error."""
    assert family.config_class is not None
    first: Exception | None = None
    for sizes in ATTEMPTS:
        try:
            config = family.config_class.from_dict(shrink(family.config_class(), sizes))
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            with torch.device("meta"):
                num_weights = sum(p.numel() for p in family(config).parameters())
            if num_weights > MOST_WEIGHTS:
                raise ValueError(f"the smallest model has {num_weights} weights")
            model = family(config).float().eval()
            scramble(model)
            logits(model, PROMPTS[0])
        except Exception as raised:  # a family needs other sizes
            _LOGGER.debug("%s is not built with %s", family.__name__, sizes, exc_info=True)
            first = first or raised
            continue
        return model
    raise RuntimeError(f"{type(first).__name__}: {first}")


@torch.no_grad()
def scramble(model: PreTrainedModel) -> None:
    """Draw weights with which attention, positions and experts matter to the logits."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(weight.shape, generator=generator)
        if not weight.is_floating_point() or name.endswith("inv_freq"):
            continue
        if weight.dim() < 2:
            weight.add_(0.3 * noise.to(weight))
        elif isinstance(weight, torch.nn.Parameter):
            embeds = weight.shape[0] == VOCAB and "head" not in name
            weight.copy_(noise * (0.3 if embeds else 1.4 / math.sqrt(weight.shape[-1])))
    for module in model.modules():  # some families set this row to zero when transformers loads them
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0


def logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return found


def compare(folder: Path, reference: PreTrainedModel) -> str | None:
    """Return how the engine's logits differ; None if they are equal. Raises StartupError."""
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=LENGTH,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        max_logprobs=VOCAB,
        num_gpu_blocks_override=16,
        num_threads=1,
    )
    params = SamplingParams(
        temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB
    )
    try:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    finally:
        llm.shutdown()
    for ids, output in zip(PROMPTS, outputs, strict=True):
        if output.error is not None:
            return f"a request fails: {output.error}"
        (sequence,) = output.outputs
        wanted = logits(reference, [*ids, *sequence.token_ids])
        expected, spread = wanted.log_softmax(-1), wanted.std().item()
        positions = [*(output.prompt_logprobs or [])[1:], *(sequence.logprobs or [])]
        for place, entry in enumerate(positions):
            assert entry is not None
            found = torch.tensor([entry[token].logprob for token in range(VOCAB)])
            distance = (found - expected[place]).abs().max().item() / spread
            if not distance <= TOLERANCE:
                return (
                    f"at position {place} of {len(ids)} + {NUM_OUTPUT} the logits differ by {distance:.2g} of their std"
                )
    return None


def weakness(reference: PreTrainedModel) -> str | None:
    """Return why equal logits would say nothing; None if each prompt token and its place matter to the last logits."""
    ids = PROMPTS[1]
    last = logits(reference, ids)[-1]
    for other in ([7, *ids[1:]], [ids[1], ids[0], *ids[2:]]):
        if (logits(reference, other)[-1] - last).abs().max() < 20 * TOLERANCE * last.std():
            return "the first tokens hardly change the last logits"
    return None


def run(name: str, folder: Path) -> tuple[str, str]:
    """Return the result and the reason of a form."""
    family = getattr(transformers, name)
    reference, problem = None, ""
    try:
        made = tiny_model(family)
        made.config.architectures = [name]
        made.save_pretrained(folder)
        reference = family.from_pretrained(folder, attn_implementation="eager").float().eval()
        logits(reference, PROMPTS[0])
    except Exception as error:
        _LOGGER.debug("%s is not built", name, exc_info=True)
        problem = first_line(error)
        write_default_config(family, folder)
    tokenizer = Tokenizer(BPE(vocab={f"t{i}": i for i in range(VOCAB)}, merges=[]))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    try:
        if reference is None:
            find_capacity(EngineConfig(model=str(folder), load_format="dummy", max_model_len=LENGTH))
            return "not built", problem
        difference = compare(folder, reference)
    except StartupError as error:
        refused = "not built" if error.code == "OutOfMemory" else "wrong"
        return ("refused" if is_refusal(name, str(error)) else refused), str(error)
    except Exception as error:
        _LOGGER.debug("%s fails", name, exc_info=True)
        return "wrong", f"{type(error).__name__}: {first_line(error)}"
    if difference is None and (weak := weakness(reference)) is not None:
        return "not built", weak
    return ("equal", "") if difference is None else ("wrong", difference)


def write_default_config(family: type[PreTrainedModel], folder: Path) -> None:
    """Write a checkpoint of the class's own sizes, without weights, whose start a refusal ends before it is built."""
    assert family.config_class is not None
    try:
        config = family.config_class()
        config.architectures = [family.__name__]
        config.save_pretrained(folder)
    except Exception:  # the class rejects its own sizes
        _LOGGER.debug("%s has no default config", family.__name__, exc_info=True)
        (folder / "config.json").write_text(json.dumps({"architectures": [family.__name__]}))


def is_refusal(name: str, message: str) -> bool:
    return name in message and "\n" not in message


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class TimeIsUpError(BaseException):
    """Ends a form; no `except Exception` on the way catches it."""


@contextmanager
def cpu_limit(seconds: int) -> Iterator[None]:
    """Bound the CPU time, so that a result does not depend on the load of the machine."""

    def end(*_: object) -> None:
        raise TimeIsUpError(f"takes more than {seconds} s of CPU time")

    previous = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model_types", nargs="*", help="Model types of transformers. Default: all.")
    parser.add_argument("--part", default="1/1", help="Part of the forms, such as 2/8. Default: 1/1.")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [form for form in forms() if not options.model_types or form[0] in options.model_types]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    counts: dict[str, int] = {}
    for model_type, name in chosen[part - 1 :: parts]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with cpu_limit(SECONDS_PER_FORM):
                    result, reason = run(name, Path(folder))
            except TimeIsUpError as error:
                result, reason = "wrong", str(error)
        print(f"{model_type}/{name}\t{result}\t{reason}", flush=True)
        counts[result] = counts.get(result, 0) + 1
        gc.collect()
    print(json.dumps(counts), file=sys.stderr)
    return int("wrong" in counts)


if __name__ == "__main__":
    sys.exit(main())
