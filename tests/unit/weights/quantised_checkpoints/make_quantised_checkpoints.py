"""Makes the tiny GPTQ and AWQ checkpoints of this folder with the package `auto-round`, and hashes of what it unpacks.

Run it in an environment of its own: pip install auto-round==0.16.1 transformers; python make_quantised_checkpoints.py.
`unpacked.json` has, for each checkpoint and weight, the SHA-256 of the bytes of auto-round's weights, rounded to
bfloat16. It gets the scales in float64, in which its products are exact.
"""

import hashlib
import json
from pathlib import Path

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
#: Name -> bits, inputs of a group, symmetric, act-order, version of the format (AWQ's is gemm).
CHECKPOINTS = {
    "symmetric": (4, 32, True, False, "gptq"),
    "zero_points": (4, 64, False, False, "gptq"),
    "act_order": (4, 32, False, True, "gptq_v2"),
    "eight_bits": (8, -1, True, False, "gptq"),
    "awq": (4, 32, False, False, "gemm"),
}
#: Seeds of the orders of inputs: layers with equal inputs have equal orders.
ORDERS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}


def model(hidden_size: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,  # auto-round 0.16.1 unpacks more outputs than inputs wrongly
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=64 // hidden_size,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config).half()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))  # norms: about 1
    return made


def pack(linear: torch.nn.Linear, settings: tuple, order: torch.Tensor) -> torch.nn.Module:
    bits, group, symmetric, act_order, version = settings
    out, size = linear.weight.shape
    ordered = torch.nn.Linear(size, out, bias=False, dtype=torch.float32)
    ordered.weight.data = linear.weight.data[:, order].float()
    groups = ordered.weight.data.view(out, -1, size if group == -1 else group)
    if symmetric:
        zeros = 1 << (bits - 1)
        scales = groups.abs().amax(-1) / (zeros - 1)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / (2**bits - 1)
        zeros = (-low / scales).round().clamp(int(version == "gptq"), 2**bits - 1)
    if version == "gemm":
        scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
        return WQLinear_GEMM.from_linear(ordered, bits, group, scales=scales.half().float(), zeros=zeros, device="cpu")
    kind = qlinear_torch_zp.QuantLinear if version == "gptq" else qlinear_torch.QuantLinear
    layer = kind(bits, group, size, out, bias=False, g_idx=True)
    layer.device = "cpu"
    layer.pack(ordered, scales.half().float(), zeros, None, "cpu")
    if act_order:
        codes = (layer.qweight.unsqueeze(1) >> torch.arange(0, 32, bits).view(1, -1, 1)) & (2**bits - 1)
        back = order.argsort()
        codes = codes.flatten(0, 1)[back].view(-1, 32 // bits, out)
        layer.qweight = (codes << torch.arange(0, 32, bits).view(1, -1, 1)).sum(1).to(torch.int32)
        layer.g_idx = (back // group).to(torch.int32)
    return layer


def unpack(layer: torch.nn.Module, size: int) -> torch.Tensor:
    if isinstance(layer, WQLinear_GEMM):
        scales = layer.scales.double()
        weight = dequantize_gemm(layer.qweight, layer.qzeros, scales, layer.w_bit, layer.group_size)
        return weight.t().float().to(torch.bfloat16)
    scales, layer.scales = layer.scales, layer.scales.double()
    weight = layer(torch.eye(size, dtype=torch.float64)).t().float().to(torch.bfloat16)
    layer.scales = scales
    return weight


def method_settings(settings: tuple) -> dict[str, object]:
    _, _, symmetric, act_order, version = settings
    if version == "gemm":
        return {"quant_method": "awq", "zero_point": not symmetric, "version": version, "modules_to_not_convert": None}
    return {"quant_method": "gptq", "sym": symmetric, "desc_act": act_order, "checkpoint_format": version}


def main() -> None:
    hashes: dict[str, dict[str, str]] = {}
    for name, settings in CHECKPOINTS.items():
        bits, group, _, act_order, _ = settings
        made, tensors = model(32 if bits == 8 else 64), {}
        hashes[name] = {}
        for part, parameter in made.named_parameters():
            layer = part.removesuffix(".weight")
            if not layer.endswith("_proj"):
                tensors[part] = parameter.data
                continue
            size = parameter.shape[1]
            seed = ORDERS[layer.rpartition(".")[2]]
            order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
            order = order if act_order else torch.arange(size)
            packed = pack(made.get_submodule(layer), settings, order)
            tensors |= {f"{layer}.{key}": value for key, value in packed.state_dict().items() if value is not None}
            values = unpack(packed, size).contiguous().view(torch.uint8).numpy().tobytes()
            hashes[name][part] = hashlib.sha256(values).hexdigest()
        folder = FOLDER / name
        folder.mkdir(exist_ok=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
        config = made.config.to_dict() | {
            "architectures": ["LlamaForCausalLM"],
            "quantization_config": {"bits": bits, "group_size": group} | method_settings(settings),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    (FOLDER / "unpacked.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
