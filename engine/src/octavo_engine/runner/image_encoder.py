"""Images of prompts: `ImagePreparer` decodes them beside the steps, `ImageEncoder` computes their rows within a step.

The rows of an image take the place of the embeddings of its tokens. Rows are kept while a sequence of the batch has the
image, pixels while their holder keeps the result of `prepare`. An image that cannot be encoded ends the sequences that
have it, also those that read its blocks, and no others of the step.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo_engine.devices.device import Device
from octavo_engine.devices.step_inputs import StepInputs, Tower
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.plan import SeqId, SeqStep, StepPlan
from octavo_engine.wire.records import ErrorInfo, ImageInput, ImageSpan

_LOGGER = logging.getLogger(__name__)
#: The arrays that the tower takes for one image, such as its pixels, by the names of transformers.
Arrays = dict[str, npt.NDArray[Any]]
_NUM_THREADS = 2  # a large image does not delay the next one


class PixelProcessor(Protocol):
    """`process` raises ValueError for bytes that are no image. Its pixels are bytes, which the encoder normalises."""

    @property
    def mean(self) -> Iterable[float]: ...

    @property
    def std(self) -> Iterable[float]: ...

    @property
    def rescale_factor(self) -> float: ...

    def process(self, data: bytes) -> Arrays: ...


@dataclass(slots=True, weakref_slot=True)
class PreparedImage:
    arrays: Arrays


class ImagePreparer:
    """Processes images on its own threads. An image is available by its digest while any result for it is kept."""

    def __init__(self, processor: PixelProcessor) -> None:
        self.processor = processor
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="image")
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[bytes, PreparedImage] = weakref.WeakValueDictionary()

    def prepare(self, image: ImageInput) -> "Future[PreparedImage]":
        return self._threads.submit(self._prepare, image)

    def arrays(self, digest: bytes) -> Arrays:
        with self._lock:
            return self._alive[digest].arrays

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, image: ImageInput) -> PreparedImage:
        with self._lock:
            found = self._alive.get(image.digest)
        prepared = found or PreparedImage(self.processor.process(image.data))
        with self._lock:
            return self._alive.setdefault(image.digest, prepared)


class ImageEncoder:
    """`encode` and `embed` are called in each step, in this order."""

    def __init__(self, processor: PixelProcessor, image_token_id: int, device: Device) -> None:
        self.preparer = ImagePreparer(processor)
        self._image_token_id = image_token_id
        self._device = device
        self._rows: dict[bytes, Tensor] = {}
        self._errors: dict[bytes, ErrorInfo] = {}
        self._failed: dict[bytes, set[SeqId]] = {}  # sequences that an error ends

    def clear(self) -> None:
        self._rows.clear()
        self._errors.clear()
        self._failed.clear()

    def encode(self, plan: StepPlan, seqs: Mapping[SeqId, SeqState], tower: Tower) -> dict[SeqId, ErrorInfo]:
        """Encode the images that the step computes first; return the errors of the sequences that end."""
        self._forget(seqs)
        for step in plan.seqs:
            seq = seqs[step.seq_id]
            for image in seq.images:
                if _computes(step, image) and image.digest not in self._rows and image.digest not in self._errors:
                    self._encode(image, self._places(seq, image), tower)
        found = dict[SeqId, ErrorInfo]()
        for seq_id in (step.seq_id for step in plan.seqs if self._errors):
            for image in seqs[seq_id].images:
                if image.digest in self._errors:
                    found[seq_id] = self._errors[image.digest]
                    self._failed[image.digest].add(seq_id)
        return found

    def embed(
        self, inputs: StepInputs, seqs: Mapping[SeqId, SeqState], embed: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return the embeddings of the step's tokens with the rows of its images; None if it has none of their tokens.

        The tokens of an image with an error keep the embedding of the placeholder: their sequence ends.
        """
        rows, places = list[Tensor](), list[npt.NDArray[np.int64]]()
        for step, first_row in zip(inputs.steps, inputs.first_row.tolist(), strict=True):
            seq = seqs[step.seq_id]
            for image in seq.images:
                found = self._rows.get(image.digest)
                if found is not None and _computes(step, image):
                    at = self._places(seq, image) - step.start
                    first, end = np.searchsorted(at, (0, step.num_tokens)).tolist()
                    rows.append(found[first:end])
                    places.append(at[first:end] + first_row)
        if not places:
            return None
        found, embeddings = torch.cat(rows), embed(inputs.input_ids)
        embeddings = F.pad(embeddings, (0, found.shape[1] - embeddings.shape[1]))  # rows of the first layers
        index = torch.from_numpy(np.concatenate(places)).to(embeddings.device)
        return embeddings.index_copy_(0, index, found.to(embeddings.dtype))

    def _places(self, seq: SeqState, image: ImageSpan) -> npt.NDArray[np.int64]:
        """Return the positions of the image's tokens, each of which has a row."""
        return image.start + np.flatnonzero(seq.token_ids[image.start : image.end] == self._image_token_id)

    def _forget(self, seqs: Mapping[SeqId, SeqState]) -> None:
        """Drop rows that no sequence has, and errors whose sequences have ended; before, others read their blocks."""
        if self._rows:
            for digest in self._rows.keys() - {image.digest for seq in seqs.values() for image in seq.images}:
                del self._rows[digest]
        for digest in [digest for digest, failed in self._failed.items() if failed.isdisjoint(seqs)]:
            del self._errors[digest], self._failed[digest]

    def _encode(self, image: ImageSpan, places: npt.NDArray[np.int64], tower: Tower) -> None:
        try:
            rows = tower.encode(self._inputs(self.preparer.arrays(image.digest)))
            if len(rows) != len(places):
                raise ValueError(f"the image has {len(rows)} rows, but {len(places)} tokens")
            if not rows.isfinite().all():
                raise ValueError("rows of the image are not finite")
            self._rows[image.digest] = rows
        except EngineDead:
            raise
        except Exception as error:
            if self._device.is_lost(error):
                raise
            _LOGGER.exception("an image could not be encoded")
            where = f"the image at tokens {image.start} to {image.end - 1} of the prompt"
            self._errors[image.digest] = ErrorInfo(f"Encoding failed for {where}: {type(error).__name__}: {error}")
            self._failed[image.digest] = set()

    def _inputs(self, arrays: Arrays) -> dict[str, Tensor]:
        """Move an image's arrays to the device, where pixels, [..., channels, height, width], are normalised."""
        tensors = {name: torch.tensor(array, device=self._device.torch_device) for name, array in arrays.items()}
        processor = self.preparer.processor
        mean, std = (
            torch.tensor([*values], device=self._device.torch_device)[:, None, None]
            for values in (processor.mean, processor.std)
        )
        return {
            name: (tensor.float() * processor.rescale_factor - mean) / std if tensor.dtype == torch.uint8 else tensor
            for name, tensor in tensors.items()
        }


def _computes(step: SeqStep, image: ImageSpan) -> bool:
    return image.start < step.start + step.num_tokens and step.start < image.end
