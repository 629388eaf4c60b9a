"""`ImageEncoder`: computes embedding rows of images in a step, from arrays of `ProcessedImages`.

The encoded rows of an image replace the embeddings of its placeholder tokens. Plans decide which images are encoded and
when their rows are dropped. If an image cannot be encoded, the sequences that need its rows in this step, or read its
blocks, end with an error. All other sequences continue, including those that computed this image's tokens from an
earlier encoding.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.devices.device import Device
from octavo_engine.devices.step_inputs import StepInputs, Tower
from octavo_engine.media.processed_images import ProcessedImages
from octavo_engine.media.worker import Arrays
from octavo_engine.runner.step_costs import moving_average
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.plan import SeqId, SeqStep, StepCosts, StepPlan
from octavo_engine.wire.records import ErrorInfo, ImageSpan

_LOGGER = logging.getLogger(__name__)


class ImageEncoder:
    """`encode` and `embed` are called in each step, in this order."""

    def __init__(self, processed: ProcessedImages, image_token_id: int, device: Device) -> None:
        self.processed = processed
        self._image_token_id = image_token_id
        self._device = device
        self._rows: dict[bytes, Tensor] = {}
        self._errors: dict[bytes, ErrorInfo] = {}
        self._failed: dict[bytes, set[SeqId]] = {}  # sequences that an error ends
        self._token_s = self._seconds = 0.0

    def clear(self) -> None:
        self._rows.clear()
        self._errors.clear()
        self._failed.clear()

    def encode(self, plan: StepPlan, seqs: Mapping[SeqId, SeqState], tower: Tower) -> dict[SeqId, ErrorInfo]:
        """Drop rows and encode images as planned; return the errors of the sequences that end."""
        for key in plan.dropped_images:
            self._rows.pop(key, None)
        for key, failed in [*self._failed.items()]:
            if key not in self._rows and failed.isdisjoint(seqs):
                del self._errors[key], self._failed[key]
        if plan.encode:
            self._device.synchronize()
            started = time.perf_counter()
            for seq_id, index in plan.encode:
                self._encode(seqs[seq_id], seqs[seq_id].images[index], tower)
            seconds = time.perf_counter() - started
            num_tokens = sum([seqs[seq_id].images[index].length for seq_id, index in plan.encode])
            self._seconds += seconds
            self._token_s = moving_average(self._token_s, seconds / num_tokens)
        found = dict[SeqId, ErrorInfo]()
        for step in plan.seqs:
            seq = seqs[step.seq_id]
            for image in seq.images if self._errors else ():
                if image.digest in self._errors and image.end > seq.num_embedded:
                    found[step.seq_id] = self._errors[image.digest]
                    self._failed[image.digest].add(step.seq_id)
            if step.seq_id not in found:
                seq.num_embedded = step.start + step.num_tokens
        return found

    def add_costs(self, costs: StepCosts) -> StepCosts:
        return replace(costs, image_token_s=self._token_s)

    def take_seconds(self) -> float:
        """Return the seconds of encoding since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def has_rows(self, plan: StepPlan, seqs: Mapping[SeqId, SeqState]) -> bool:
        """Return True if a step computes tokens of an image."""
        return any(_computes(step, image) for step in plan.seqs for image in seqs[step.seq_id].images)

    def embed(
        self, inputs: StepInputs, seqs: Mapping[SeqId, SeqState], embed: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return the embeddings of the step's tokens, in which rows of images replace those of placeholders; None if
        the step has no token of an image.

        If an image has an error, its tokens keep the placeholder's embedding, because their sequence ends.
        """
        rows, places = list[Tensor](), list[npt.NDArray[np.int64]]()
        for step, first_row in zip(inputs.steps, inputs.first_row.tolist(), strict=True):
            seq = seqs[step.seq_id]
            for image in seq.images:
                if _computes(step, image) and image.digest not in self._errors:
                    found = self._rows[image.digest]
                    at = self._places(seq, image) - step.start
                    first, end = np.searchsorted(at, (0, step.num_tokens)).tolist()
                    rows.append(found[first:end])
                    places.append(at[first:end] + first_row)
        if not places:
            return None
        found, embeddings = torch.cat(rows), embed(inputs.input_ids)
        embeddings = F.pad(embeddings, (0, found.shape[1] - embeddings.shape[1]))  # no addend in the first layers
        index = torch.from_numpy(np.concatenate(places)).to(embeddings.device)
        return embeddings.index_copy_(0, index, found.to(embeddings.dtype))

    def _places(self, seq: SeqState, image: ImageSpan) -> npt.NDArray[np.int64]:
        """Return the positions of the image's tokens, each of which has a row."""
        return image.start + np.flatnonzero(seq.token_ids[image.start : image.end] == self._image_token_id)

    def _encode(self, seq: SeqState, image: ImageSpan, tower: Tower) -> None:
        key, places = image.digest, self._places(seq, image)
        self._errors.pop(key, None)
        self._failed.pop(key, None)
        try:
            rows = tower.encode(self._inputs(self.processed.arrays(image.digest)))
            if len(rows) != len(places):
                raise ValueError(f"the image has {len(rows)} rows, but {len(places)} tokens")
            if not rows.isfinite().all():
                raise ValueError("rows of the image are not finite")
            self._rows[key] = rows
        except EngineDead:
            raise
        except Exception as error:
            if self._device.is_lost(error):
                raise
            _LOGGER.exception("an image could not be encoded")
            where = f"the image at tokens {image.start} to {image.end - 1} of the prompt"
            self._errors[key] = ErrorInfo(f"Encoding failed for {where}: {type(error).__name__}: {error}")
            self._failed[key] = set()
            self._rows[key] = torch.empty(0)  # plans expect an entry until they drop it

    def _inputs(self, arrays: Arrays) -> dict[str, Tensor]:
        """Move an image's arrays to the device, where pixels, [..., channels, height, width], are normalised."""
        tensors = {name: torch.tensor(array, device=self._device.torch_device) for name, array in arrays.items()}
        pixels = self.processed.normalisation
        mean, std = (
            torch.tensor([*values], device=self._device.torch_device)[:, None, None]
            for values in (pixels.mean, pixels.std)
        )
        return {
            name: tensor.float().mul_(pixels.rescale_factor).sub_(mean).div_(std)
            if tensor.dtype == torch.uint8
            else tensor
            for name, tensor in tensors.items()
        }


def _computes(step: SeqStep, image: ImageSpan) -> bool:
    return image.start < step.start + step.num_tokens and step.start < image.end
