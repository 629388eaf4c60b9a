"""The devices whose tensors the Triton kernels take in place of torch's operators."""

from torch import Tensor

#: Device types that run the Triton kernels. Tests add the CPU (Triton's interpreter) and `meta` (compilation only).
DEVICES = {"cuda"}


def runs_triton(x: Tensor) -> bool:
    return x.device.type in DEVICES
