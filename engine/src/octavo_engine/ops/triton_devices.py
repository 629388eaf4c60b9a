"""The devices whose tensors the Triton kernels take in place of torch's operators."""

from torch import Tensor

#: Device types. Tests add the CPU, for Triton's interpreter, and `meta`, where kernels are only compiled.
DEVICES = {"cuda"}


def runs_triton(x: Tensor) -> bool:
    return x.device.type in DEVICES
