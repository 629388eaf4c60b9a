"""Divides one step's attention for the native kernel: tiles of queries, parts of long contexts, merges of the parts.

The keys of a sequence with few queries (decode, drafts, a short chunk) are divided at multiples of `PART_KEYS`; with
more queries, each tile processes all its keys. The division, and so the result, depends only on the sequence itself. It
is the same for one query and for several: a draft has the bits of a decode step.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_engine.ops.cpu_groups import Ints, Lengths

PART_KEYS = 256
DIVIDED_QUERIES = 33  # the most tokens of a decode step with drafts

_TILE_FIELDS = 8  # seq, token_row, position, num_queries, key_begin, key_end, partial, unused: `struct Tile`


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work list: `tiles` [n, 8] and `merges` [m, 4], int32, the kernel's structs; expensive tiles come first."""

    tiles: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]
    num_partials: int


def make_tiles(lengths: Lengths, *, group: int, window: int | None, tile_rows: int, chunk_keys: int) -> Tiles:
    """Make the work list. `chunk_keys`: a window that begins inside a chunk is extended to the chunk's first key."""
    per_tile = max(1, tile_rows // group)
    first = lengths.seq - lengths.query
    num_tiles = -(-lengths.query // per_tile)
    oldest = _oldest_key(first, window) // chunk_keys * chunk_keys
    is_divided = (num_tiles == 1) | (lengths.query <= DIVIDED_QUERIES)
    num_parts = np.where(is_divided, -(-lengths.seq // PART_KEYS) - oldest // PART_KEYS, 1)
    units = num_tiles * num_parts
    seq = np.repeat(np.arange(len(units)), units)
    index = np.arange(len(seq)) - np.repeat(np.cumsum(units) - units, units)
    tile, part_idx = np.divmod(index, num_parts[seq])

    query = tile * per_tile
    num_queries = np.minimum(per_tile, lengths.query[seq] - query)
    position = first[seq] + query
    part = (oldest[seq] // PART_KEYS + part_idx) * PART_KEYS
    key_begin = _oldest_key(position, window) // chunk_keys * chunk_keys
    key_begin = np.where(is_divided[seq], np.maximum(part, key_begin), key_begin)
    key_end = position + num_queries
    key_end = np.where(is_divided[seq], np.minimum(part + PART_KEYS, key_end), key_end)

    is_cut = num_parts[seq] > 1
    partial = np.where(is_cut, np.cumsum(is_cut) - 1, -1)
    row = lengths.row[seq] + query
    columns = [seq, row, position, num_queries, key_begin, key_end, partial, np.zeros_like(seq)]
    tiles = np.stack(columns, axis=1).astype(np.int32)
    order = np.argsort(-(num_queries * (key_end - key_begin)), kind="stable")
    merges = np.stack([row, num_queries, partial, num_parts[seq]], axis=1)[is_cut & (part_idx == 0)]
    return Tiles(np.ascontiguousarray(tiles[order]), merges.astype(np.int32), int(is_cut.sum()))


def _oldest_key(position: Ints, window: int | None) -> Ints:
    return np.zeros_like(position) if window is None else np.maximum(0, position + 1 - window)
