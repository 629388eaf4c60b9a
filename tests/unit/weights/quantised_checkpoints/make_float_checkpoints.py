"""Makes the tiny checkpoints of this folder in FP8, NF4, FP4 and bitsandbytes' int8, and hashes of what is unpacked.

Run it in an environment of its own: pip install compressed-tensors==0.20.0 bitsandbytes==0.50.2 transformers; python
make_float_checkpoints.py. `unpacked_floats.json` has, for each checkpoint and weight, the SHA-256 of the bytes of the
package's weight in fp32. The query projection has all finite codes.
"""

import hashlib
import json
from pathlib import Path

import torch
from bitsandbytes import functional as bnb
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
#: Name -> hidden and inner size, settings of weights, of activations, type of scales. Blocks of 128 do not divide 160.
FP8 = {
    "fp8_tensor": (32, 48, {"strategy": "tensor"}, _STATIC, torch.float32),
    "fp8_channel": (32, 48, {"strategy": "channel"}, _DYNAMIC, torch.bfloat16),
    "fp8_block": (64, 160, {"strategy": "block", "block_structure": [128, 128]}, _DYNAMIC, torch.float32),
}
#: Name -> hidden and inner size, settings. Blocks of 64 cross rows of 160.
BITSANDBYTES = {
    "bnb_nf4": (64, 160, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}),
    "bnb_fp4": (64, 96, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}),
    "bnb_int8": (32, 48, {"load_in_8bit": True, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["lm_head"]}),
}


def model(hidden_size: int, inner_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=hidden_size,
        intermediate_size=inner_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))  # norms: about 1
    return made


def fp8_scales(weight: Tensor, settings: dict) -> Tensor:
    out, size = weight.shape
    block_out, block_in = settings.get("block_structure", (out if settings["strategy"] == "tensor" else 1, size))
    padded = F.pad(weight.float(), (0, -size % block_in, 0, -out % block_out))
    blocks = padded.view(len(padded) // block_out, block_out, -1, block_in)
    scales = blocks.abs().amax((1, 3)) / 448
    return scales.flatten() if settings["strategy"] == "tensor" else scales


def fp8_layer(weight: Tensor, settings: dict, activations: dict, dtype: torch.dtype, *, all_codes: bool):
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    scales = fp8_scales(weight, settings).to(dtype)
    parts = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    if all_codes:
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[(codes & 0x7F) != 0x7F].repeat(weight.numel() // 254 + 1)[: weight.numel()]
        parts["weight"] = codes.view(weight.shape).view(torch.float8_e4m3fn)
    exact = parts | {"weight_scale": scales.float()}
    values = FloatQuantizationCompressor.decompress(exact, scheme)["weight"]
    if activations is _STATIC:
        parts["input_scale"] = torch.tensor([0.05])
    return parts, values, scheme


def four_bit_layer(weight: Tensor, settings: dict) -> tuple[dict[str, Tensor], Tensor]:
    """Quantise and unpack the flattened weight: bitsandbytes 0.50.2 errs on a CPU if blocks cross rows."""
    kind, nested = settings["bnb_4bit_quant_type"], settings["bnb_4bit_use_double_quant"]
    flat = weight.float().view(1, -1)
    packed, state = bnb.quantize_4bit(flat, quant_type=kind, blocksize=64, compress_statistics=nested)
    values = bnb.dequantize_4bit(packed, state).view(weight.shape)
    state.shape, state.dtype = weight.shape, torch.bfloat16
    return {"weight": packed} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}, values


def int8_layer(weight: Tensor, *, all_codes: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    if all_codes:
        codes = (torch.arange(weight.numel()) % 256 - 128).to(torch.int8).view(weight.shape)
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, bnb.int8_vectorwise_dequant(codes, scales)


def write(name: str, made: LlamaForCausalLM, tensors: dict[str, Tensor], settings: dict) -> None:
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    config = made.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    hashes: dict[str, dict[str, str]] = {}
    for name, (hidden, inner, settings, *others) in (FP8 | BITSANDBYTES).items():
        made, tensors, hashes[name] = model(hidden, inner), {}, {}
        config = {"quant_method": "bitsandbytes", **settings}
        for part, parameter in made.named_parameters():
            layer = part.removesuffix(".weight")
            if not layer.endswith("_proj"):
                tensors[part] = parameter.data
                continue
            all_codes = layer.endswith("q_proj")
            if name in FP8:
                parts, values, scheme = fp8_layer(parameter.data, settings, *others, all_codes=all_codes)
                config = {
                    "quant_method": "compressed-tensors",
                    "format": "float-quantized",
                    "quantization_status": "compressed",
                    "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
                    "ignore": ["lm_head"],
                }
            elif "load_in_8bit" in settings:
                parts, values = int8_layer(parameter.data, all_codes=all_codes)
            else:
                parts, values = four_bit_layer(parameter.data, settings)
            tensors |= {f"{layer}.{key}": value for key, value in parts.items()}
            assert values.dtype == torch.float32
            raw = values.contiguous().numpy().tobytes()
            hashes[name][part] = hashlib.sha256(raw).hexdigest()
        write(name, made, tensors, config)
    (FOLDER / "unpacked_floats.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
