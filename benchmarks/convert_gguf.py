"""Convert a folder with one GGUF file to a Hugging Face folder in bf16, for peers: convert_gguf.py SOURCE TARGET."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, target: Path) -> None:
    name = next(source.glob("*.gguf")).name
    dequantize = GgufConfig(dequantize=True)  # otherwise the weights stay packed
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=dequantize
    )
    if hasattr(model.config, "quantization_config"):  # some versions of transformers remove it themselves
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
