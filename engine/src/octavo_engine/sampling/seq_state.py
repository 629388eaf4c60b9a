"""`SeqState`: the runner's state of one sequence besides its rows in the batch arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from octavo_engine.devices.transfers import Copy, keep
from octavo_engine.sampling.logit_edits import TokenCounts, TokenMasks
from octavo_engine.wire.plan import NewSeq, SeqId
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import ImageSpan
from octavo_engine.wire.sampling import SamplingParams


@dataclass(slots=True, kw_only=True)
class SeqState:
    """`token_ids`: the sequence's row of the batch array, as a view; it is longer than the sequence.

    `positions`: positions of tokens up to the last image with a grid, [3, tokens]; a later token's position is its
    index + `offset`. `num_embedded`: number of leading tokens, computed so far, whose images all had rows.
    """

    seq_id: SeqId
    slot: int
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: npt.NDArray[np.int32]
    counts: TokenCounts | None  # None: the request has no penalties
    masks: TokenMasks | None  # None: the request has no masks
    adapter: str = ""
    pooling: PoolingParams | None = None
    images: tuple[ImageSpan, ...] = ()
    positions: npt.NDArray[np.int32] | None = None
    offset: int = 0
    num_embedded: int = 0
    pooled: torch.Tensor | None = None  # of the rows so far: their sum, or the first one, in fp32

    @staticmethod
    def from_new_seq(
        new: NewSeq, slot: int, token_ids: npt.NDArray[np.int32], *, vocab_size: int, copy: Copy = keep
    ) -> "SeqState":
        params = new.params
        positions, offset = grid_positions(new.images)
        masked = params if new.grammar is None else replace(params, min_tokens=0)  # GrammarState enforces min_tokens
        return SeqState(
            seq_id=new.seq_id,
            slot=slot,
            params=params,
            num_prompt_tokens=new.num_prompt_tokens,
            token_ids=token_ids,
            counts=TokenCounts(params, new.num_prompt_tokens) if params.has_penalties else None,
            masks=TokenMasks.from_params(masked, new.eos_token_id, vocab_size=vocab_size, copy=copy),
            adapter=new.adapter,
            pooling=new.pooling,
            images=new.images,
            positions=positions,
            offset=offset,
        )

    def output(self, length: int) -> npt.NDArray[np.int32]:
        """Return the generated tokens of a sequence that has `length` tokens in total."""
        return self.token_ids[self.num_prompt_tokens : length]


def grid_positions(images: Sequence[ImageSpan]) -> tuple[npt.NDArray[np.int32] | None, int]:
    """Return the positions up to the end of the last image with a grid (None without one), and the offset after it.

    An image token's three coordinates are the image's position, this position plus the token's row, and plus its
    column. A text token has three equal coordinates; text continues after the image's largest coordinate.
    """
    parts, end, offset = list[npt.NDArray[np.int32]](), 0, 0
    for image in images:
        if image.grid is not None:
            rows, columns = image.grid
            at = np.arange(image.length)
            parts.append(np.tile(np.arange(end, image.start, dtype=np.int32) + offset, (3, 1)))
            parts.append(np.stack((0 * at, at // columns, at % columns)).astype(np.int32) + image.start + offset)
            end, offset = image.end, offset + max(rows, columns) - image.length
    return (np.concatenate(parts, axis=1), offset) if parts else (None, 0)
