"""`NewestTokens`: the newest token of each slot, on the device, for steps that start before the host knows it."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_engine.devices.transfers import Copy

UNKNOWN = -1  # stands for a token that a step in flight samples


class NewestTokens:
    """`copy`: of the host's numbers to the device."""

    def __init__(self, num_slots: int, device: torch.device, copy: Copy) -> None:
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._copy = copy

    def store(self, slots: npt.NDArray[np.int64], tokens: Tensor) -> None:
        """Store tokens of slots; -1, of a row with an error, becomes a token whose results are dropped."""
        self._tokens.index_copy_(0, self._copy(torch.from_numpy(slots)), tokens.clamp(min=0))

    def fill_in(self, input_ids: Tensor, slots: Tensor) -> Tensor:
        """Return input ids with the newest tokens of their slots in place of unknown ones."""
        return torch.where(input_ids == UNKNOWN, self._tokens[slots].to(input_ids.dtype), input_ids)
