"""Makes the tiny checkpoints of this folder that compressed-tensors packs, and hashes of what it unpacks.

Run it after make_quantised_checkpoints.py, in the same environment: pip install compressed-tensors==0.20.0; python
make_compressed_checkpoints.py. It adds to `unpacked.json`; it gets the scales in float64, in which products are exact.
"""

import hashlib
import json

import torch
from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from make_quantised_checkpoints import FOLDER, model
from safetensors.torch import save_file

_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
#: Name -> format, settings of weights, of activations.
CHECKPOINTS = {
    "ct_packed": ("pack-quantized", {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}, None),
    "ct_zeros": ("pack-quantized", {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 64}, None),
    "ct_int8": ("int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}, _ACTIVATIONS),
}  # fmt: skip
COMPRESSORS = {"pack-quantized": PackedQuantizationCompressor, "int-quantized": IntQuantizationCompressor}


def parameters(weight: torch.Tensor, settings: dict) -> dict[str, torch.Tensor]:
    out, size = weight.shape
    groups = weight.float().view(out, -1, settings.get("group_size", size))
    half = 1 << (settings["num_bits"] - 1)
    if settings["symmetric"]:
        scales = (groups.abs().amax(-1) / (half - 1)).bfloat16()
        zeros = torch.zeros_like(scales, dtype=torch.int8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / (2 * half - 1)).bfloat16()
        zeros = (-half - low / scales.float()).round().clamp(-half, half - 1).to(torch.int8)
    return {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}


def main() -> None:
    hashes = json.loads((FOLDER / "unpacked.json").read_text())
    for name, (layout, settings, activations) in CHECKPOINTS.items():
        args = QuantizationArgs(type="int", **settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
        made, tensors = model(32 if settings["num_bits"] == 8 else 64).bfloat16(), {}
        hashes[name] = {}
        for part, parameter in made.named_parameters():
            layer = part.removesuffix(".weight")
            if not layer.endswith("_proj"):
                tensors[part] = parameter.data
                continue
            packed = COMPRESSORS[layout].compress(parameters(parameter.data, settings), scheme)
            tensors |= {f"{layer}.{key}": value.contiguous() for key, value in packed.items()}
            exact = packed | {"weight_scale": packed["weight_scale"].double()}
            weight = COMPRESSORS[layout].decompress(exact, scheme)["weight"]
            assert weight.dtype == torch.float64
            values = weight.float().to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
            hashes[name][part] = hashlib.sha256(values).hexdigest()
        folder = FOLDER / name
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        config = made.config.to_dict() | {
            "architectures": ["LlamaForCausalLM"],
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": layout,
                "quantization_status": "compressed",
                "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
                "ignore": ["lm_head"],
            },
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    (FOLDER / "unpacked.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
