"""Quantised checkpoints of families that transformers runs: their weights stay as they are, and are those unpacked."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.quantised_method import QuantisedMethod
from octavo_engine.models.model import Model
from octavo_engine.ops.activation import Activation, act_mul
from octavo_engine.ops.native_quantised import QuantisedTensor
from octavo_engine.runner.checkpoint import read_checkpoint
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.runner.model_loading import load_checkpoint
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.resolve import resolve_files
from octavo_testing.block_products import distance, reference
from octavo_testing.paged import PagedDriver
from octavo_testing.quantised_tiny import make_quantised
from torch import Tensor

pytestmark = pytest.mark.slow

FAMILIES = ("glm4_moe", "minimax_m2", "olmo3")
#: Method -> the most bytes of a linear layer's weight, as a share of bfloat16's.
METHODS = {"gptq": 0.36, "awq": 0.36, "ct_packed": 0.36, "ct_symmetric": 0.30, "ct_int": 0.54}
TOKENS = [*range(3, 41), 5, 5, 9]
DEVICE = CpuDevice()


def loaded(folder: Path, **settings: Any) -> Model:
    config = EngineConfig(model=str(folder), max_model_len=64, num_gpu_blocks_override=20, num_threads=1, **settings)
    checkpoint = read_checkpoint(config, resolve_files(config))
    plan = plan_memory(config, DEVICE, checkpoint.config, checkpoint.stored)
    model = load_checkpoint(DEVICE, checkpoint, plan).model
    assert plan.model.weights_bytes == pytest.approx(model.weights_bytes(), rel=0.02)
    return model


def logits_of(model: Model) -> Tensor:
    return PagedDriver(model).feed({0: TOKENS})[0]


def weights_bytes(model: Model) -> int:
    """Return the bytes of the layers that are quantised: all but the head."""
    linears = (each for each in model.modules() if isinstance(each, Linear) and not each.spec.wide)
    return sum(each.weights_bytes() for each in linears)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_have_the_unpacked_weights_and_their_reference_bits(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 both checkpoints are equal. In bfloat16 products round their inputs, as the reference in torch does."""
    quantised, unpacked = make_quantised(family, method, tmp_path, group=32)
    assert torch.equal(logits_of(loaded(quantised, dtype="float32")), logits_of(loaded(unpacked, dtype="float32")))
    model, plain = loaded(quantised), loaded(unpacked, dtype="bfloat16")
    assert weights_bytes(model) <= METHODS[method] * weights_bytes(plain)
    found = logits_of(model)
    assert 0 < distance(found, logits_of(plain)) < 0.6  # rounded inputs may choose other experts
    with monkeypatch.context() as patch:
        multiply_in_torch(patch)
        expected = logits_of(loaded(quantised))
    assert torch.equal(found, expected)


def multiply_in_torch(patch: pytest.MonkeyPatch) -> None:
    """Let products of weights in blocks be those of the reference, which has the bits of the kernel."""
    kept: dict[QuantisedMethod, list[QuantisedTensor]] = {}

    def load(self: QuantisedMethod, name: str, part: int, tensor: QuantisedTensor, rows: range) -> None:
        kept.setdefault(self, []).append(QuantisedTensor(tensor.format, tensor.rows[rows.start : rows.stop]))

    def apply(self: QuantisedMethod, x: Tensor) -> Tensor:
        outputs = [reference(x, tensor, is_fused=True) for tensor in kept[self]]
        return torch.cat(outputs, 1).to(x.dtype)

    def gated(self: QuantisedMethod, x: Tensor, activation: Activation) -> Tensor:
        return act_mul(apply(self, x), activation)

    patch.setattr(QuantisedMethod, "_load_stored", load)
    patch.setattr(QuantisedMethod, "apply", apply)
    patch.setattr(QuantisedMethod, "apply_gated", gated)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_quantised_while_they_load(
    family: str, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those of an FP8 checkpoint, which no log line then calls expanded. Routers stay as they are."""
    quantised, unpacked = make_quantised(family, "fp8_block", tmp_path, block=(32, 32))
    with caplog.at_level(logging.INFO):
        model = loaded(quantised, quantization=quantization)
    names = model.quantised_tensors()
    assert len(names) > 20
    assert not [name for name in names if "embed" in name or "lm_head" in name or name.endswith("gate.weight")]
    assert not [line for line in caplog.messages if "are expanded to" in line]
    exact = logits_of(loaded(unpacked, dtype="bfloat16"))
    assert 0 < distance(logits_of(model), exact) < {"int8": 0.4, "int4": 0.9}[quantization]


@pytest.mark.parametrize("method", ["fp8_block", "nf4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formats_without_blocks_are_expanded(family: str, method: str, tmp_path: Path) -> None:
    quantised, unpacked = make_quantised(family, method, tmp_path)
    model = loaded(quantised, dtype="float32")
    assert not model.block_tensors()
    torch.testing.assert_close(logits_of(model), logits_of(loaded(unpacked, dtype="float32")), rtol=0, atol=1e-4)
