"""Loading takes the memory of the model plus one tensor, measured as the peak resident size of a separate process."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

MIB = 1 << 20
NUM_LAYERS = 12
ROWS, COLUMNS = 4096, 1024
LARGEST = 16384 * COLUMNS * 2  # the embedding, in bfloat16: 32 MiB
FINAL = LARGEST + NUM_LAYERS * ROWS * COLUMNS * 2

#: Simulates a model: bfloat16 parameters, "filled" one by one after all were allocated, or "grown" as tensors arrive,
#: which shows holes that the allocator keeps. A first pass that keeps nothing loads imports and buffers.
#: Not `ru_maxrss`: a child inherits its parent's.
CONSUMER = """
import sys, torch
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights

def status(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

files = resolve_model(sys.argv[1])
shapes = {name: tensor.shape for name, tensor in iter_weights(files, dtype=torch.bfloat16)}
empty = lambda name: torch.empty(shapes[name], dtype=torch.bfloat16)
model = {} if sys.argv[2] == "grown" else {name: empty(name) for name in shapes}
before = status("VmRSS")
for name, tensor in iter_weights(files, dtype=torch.bfloat16):
    model.setdefault(name, empty(name)).copy_(tensor)
    del tensor
print(sum(tensor.nbytes for tensor in model.values()), status("VmHWM") - before)
"""


def write_safetensors(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    names = [f"layer.{layer}" for layer in range(NUM_LAYERS)]
    state = {name: torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16) for name in names}
    state["the_largest_comes_last"] = torch.zeros(16384, COLUMNS, dtype=torch.bfloat16)
    save_file(state, folder / "model.safetensors")
    return folder


def write_quantised(path: Path) -> Path:
    path = path.with_suffix(".gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length, writer.add_head_count):
        add(16)

    def add_matrix(name: str, rows: int) -> None:
        zeros = np.zeros((rows, COLUMNS // 32 * 34), dtype=np.uint8)
        writer.add_tensor(name, zeros, raw_dtype=GGMLQuantizationType.Q8_0)

    for layer in range(NUM_LAYERS):
        add_matrix(f"blk.{layer}.attn_q.weight", ROWS)
    add_matrix("token_embd.weight", 16384)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("write", "mode"), [(write_safetensors, "filled"), (write_safetensors, "grown"), (write_quantised, "filled")]
)
def test_peak_memory_is_the_model_plus_its_largest_layer(tmp_path: Path, write, mode: str) -> None:
    """A float32 copy of the embedding (64 MiB), a second copy of it, or a whole file in memory exceeds the limit."""
    command = [sys.executable, "-c", CONSUMER, str(write(tmp_path / "model")), mode]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    final, peak = map(int, result.stdout.split())
    assert final == FINAL
    slack = 6 * MIB  # of the allocator: less than one layer, so that a tensor kept too long shows
    assert peak <= FINAL + LARGEST + slack, f"peak {peak / MIB:.0f} MiB, final {FINAL / MIB:.0f} MiB"
    assert peak > FINAL / 2, "the measurement does not detect the load"
