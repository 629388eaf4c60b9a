"""`--dtype auto` on a CPU: bf16 or fp32, whichever this machine multiplies faster, measured with the model's shapes.

The packed linears of one layer are timed at 1, 64 and 512 rows in both dtypes (one decode stream, a busy decode step, a
prefill chunk), and the dtype with the smaller geometric mean of the times is chosen; bf16 is preferred within 10 %, as
it halves the memory of weights and KV. An fp32 checkpoint is treated the same: `--dtype float32` keeps its precision.
The result is cached in XDG_CACHE_HOME/octavo, keyed by CPU, torch, threads, shapes and availability of the kernels.
"""

import hashlib
import json
import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo_engine.ops.cpu_level import cache_folder, cpu_signature
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.packed_linear import PackedWeight, pack, packed_linear
from octavo_engine.settings.records import ModelConfig

_LOGGER = logging.getLogger(__name__)
ROWS = (1, 64, 512)
_BUDGET_S = 0.08  # per dtype and number of rows
_ADVANTAGE = 1.1  # the factor by which bf16 may be slower and still be chosen
_MOST_WEIGHTS = 1 << 22  # most elements of a measured matrix: only part of a larger matrix is measured
_BEYOND_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    in_features: int
    out_features: int


Times = dict[str, list[float]]


def choose_cpu_dtype(model: ModelConfig) -> torch.dtype:
    shapes = layer_shapes(model)
    path = cache_folder() / f"dtype-{_key(shapes)}.json"
    times = _read(path)
    if times is None:
        times = {name: _measure(shapes, dtype) for name, dtype in _TYPES.items()}
        _write(path, times)
    name = faster_type(times)
    _LOGGER.info("dtype auto: chose %s (measured ms per layer at %s rows: %s)", name, ROWS, _show(times))
    return _TYPES[name]


def faster_type(times: Times) -> str:
    """Choose the dtype from `times[dtype][i]`, the seconds at `ROWS[i]`."""
    small, large = (math.prod(times[name]) ** (1 / len(ROWS)) for name in ("bfloat16", "float32"))
    return "bfloat16" if small <= large * _ADVANTAGE else "float32"


def layer_shapes(model: ModelConfig) -> list[GemmShape]:
    """Return the shapes of one layer's fused projections; the MLP's width has different names in configs."""
    hidden = model.hidden_size
    widths = (model.hf.get(k) for k in ("intermediate_size", "ffn_dim", "n_inner"))
    width = next((w for w in widths if type(w) is int and w > 0), 4 * hidden)
    attention = model.num_heads * model.head_dim
    return [
        GemmShape(in_features=hidden, out_features=attention + 2 * model.num_kv_heads * model.head_dim),
        GemmShape(in_features=attention, out_features=hidden),
        GemmShape(in_features=hidden, out_features=2 * width),
        GemmShape(in_features=width, out_features=hidden),
    ]


_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@torch.inference_mode()
def _measure(shapes: list[GemmShape], dtype: torch.dtype) -> list[float]:
    """Measure the seconds of one layer's linears at each of `ROWS`; at 1 row, over copies that exceed the CPU cache."""
    cuts = [min(1.0, _MOST_WEIGHTS / (s.in_features * s.out_features)) for s in shapes]
    layer_bytes = (
        sum(cut * s.in_features * s.out_features for s, cut in zip(shapes, cuts, strict=True)) * dtype.itemsize
    )
    layers = [
        [
            pack(torch.full((max(1, int(s.out_features * cut)), s.in_features), 0.01, dtype=dtype))
            for s, cut in zip(shapes, cuts, strict=True)
        ]
        for _ in range(math.ceil(_BEYOND_CACHE_BYTES / layer_bytes))
    ]
    times = []
    for rows in ROWS:
        used = layers if rows == 1 else layers[:1]
        inputs = [torch.full((rows, s.in_features), 0.01, dtype=dtype) for s in shapes]
        times.append(_best_time(used, inputs, cuts) / len(used))
    return times


def _best_time(layers: list[list[PackedWeight]], inputs: list[Tensor], cuts: list[float]) -> float:
    """Return the seconds of all layers: the sum of each matrix's best time, scaled up if it was measured in part."""
    best = [math.inf] * len(cuts)
    deadline = time.perf_counter() + _BUDGET_S
    rounds = 0
    while rounds < 2 or time.perf_counter() < deadline:
        for i, x in enumerate(inputs):
            started = time.perf_counter()
            for layer in layers:
                packed_linear(x, layer[i])
            best[i] = min(best[i], time.perf_counter() - started)
        rounds += 1
    return sum(t / cut for t, cut in zip(best, cuts, strict=True))


def _key(shapes: list[GemmShape]) -> str:
    parts = [
        cpu_signature(),
        torch.__version__,
        torch.get_num_threads(),
        [(s.in_features, s.out_features) for s in shapes],
        native_library() is not None,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> Times | None:
    try:
        times = json.loads(path.read_text())
        return {name: [float(t) for t in times[name]] for name in _TYPES}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write(path: Path, times: Times) -> None:
    """Cache the times. If the cache cannot be written, the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(times, file)
        Path(file.name).replace(path)
    except OSError as error:
        _LOGGER.debug("the measured times cannot be cached in %s: %s", path, error)


def _show(times: Times) -> str:
    return ", ".join(f"{name} " + "/".join(f"{t * 1e3:.2f}" for t in values) for name, values in times.items())
