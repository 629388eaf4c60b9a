"""The memory that a plan counts for a model that takes images, compared with what is resident at the most.

A child process measures VmHWM from the start of the loading to the end of the largest image and of a prompt that fills
the KV cache, with that of the process that decodes the image. A tiny engine runs before, so that libraries are loaded;
freed memory leaves the process at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from octavo_testing.tiny_models import VOCAB
from octavo_testing.vision_checkpoints import VISION, VisionFiles, vision_tokenizer, write_vision_files

pytestmark = pytest.mark.slow

MEASURE = """
import ctypes, gc, os, sys
from io import BytesIO
from pathlib import Path
import numpy as np
from PIL import Image
from octavo_engine import LLM, SamplingParams
from octavo_engine.runner import load

def status(name, pid="self"):
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition(name + ":")[2].split()[0])

def parent(stat):
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # the process has ended
        return None

def run(folder):
    limits = {"max_model_len": 2048, "num_gpu_blocks_override": 128, "max_num_batched_tokens": 512, "max_num_seqs": 4}
    limits |= {"mm_processor_cache_gb": 1 / 256, "media_workers": 1}
    llm = LLM(folder, load_format="dummy", dtype="float32", num_threads=1, **limits)
    pixels, data = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8), BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    shown = {"prompt_token_ids": [int(sys.argv[3])], "multi_modal_data": {"image": [data.getvalue()]}}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5] * 2000}, shown], params, use_tqdm=False)
    assert llm.stats.encoded_images == 1
    (worker,) = [stat.parent.name for stat in Path("/proc").glob("[0-9]*/stat") if parent(stat) == os.getpid()]
    peak = status("VmHWM") + status("VmHWM", worker)
    llm.shutdown()
    return peak

plans, plan_ranks = [], load.plan_ranks
load.plan_ranks = lambda *args: plans.append(plan_ranks(*args)) or plans[-1]
run(sys.argv[1])
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
before = status("VmRSS")
peak = run(sys.argv[2])
plan = plans[-1].ranks[0]
print(plan.model.weights_bytes, plan.kv.kv_bytes, plan.model.images_bytes, peak - before)
"""


def write_model(folder: Path, files: VisionFiles, *, tower: int, text: int) -> Path:
    """Write a model without weights. `tower`, `text`: the hidden sizes of its parts."""
    seen = {"hidden_size": tower, "intermediate_size": 4 * tower, "num_hidden_layers": 2, "num_attention_heads": 2}
    read = {"model_type": "llama", "vocab_size": vision_tokenizer().get_vocab_size(), "hidden_size": text}
    read |= {"intermediate_size": 2 * text, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    read |= {"max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    hf = files.hf | {"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"]}
    hf |= {"vision_config": seen | files.hf["vision_config"], "text_config": read, "image_token_id": VOCAB}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    return write_vision_files(folder, files)


def test_planned_memory_is_within_a_tenth_of_the_resident_one(tmp_path: Path) -> None:
    small = VISION["smolvlm"]
    sides = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 1024}}
    hf = {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4}
    large = VisionFiles(family="smolvlm", hf=hf, image=small.image | sides, template=small.template)
    tiny = write_model(tmp_path / "tiny", small, tower=32, text=64)
    model = write_model(tmp_path / "model", large, tower=640, text=512)
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(model), str(VOCAB)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    weights, kv, images, resident = map(int, found.stdout.split())
    print(f"weights {weights}, KV cache {kv}, images {images}, resident {resident}")
    assert images > weights
    assert (weights + kv + images) == pytest.approx(resident, rel=0.1)
