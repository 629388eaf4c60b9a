"""Divides attention heads among ranks: a rank has whole KV heads with their query heads, or a part of one KV head's.

With more ranks than KV heads, several ranks hold a copy of one KV head.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo_engine.layers.layer import BuildContext, inputs_of_cut
from octavo_engine.layers.shard import Shard, split_inputs, split_outputs
from octavo_engine.ops.rank_group import Group
from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeads:
    """A rank's heads, by their numbers in the model. `dim`: values of a head. `copies`: ranks that hold a KV head."""

    queries: range
    keys: range
    dim: int
    copies: int

    @property
    def query_values(self) -> range:
        return range(self.queries.start * self.dim, self.queries.stop * self.dim)

    @property
    def key_values(self) -> range:
        return range(self.keys.start * self.dim, self.keys.stop * self.dim)

    def split_qkv(self, group: Group) -> Shard:
        return split_outputs(group, self.query_values, self.key_values, self.key_values)

    def split_out(self, group: Group) -> Shard:
        return split_inputs(group, self.query_values)


def rank_heads(out: str, num_heads: int, num_kv_heads: int, dim: int, build: BuildContext) -> RankHeads:
    """Return this rank's heads. `out`: name of the output projection, whose inputs are the heads' values.

    Raises StartupError if the heads of a rank cut blocks of this tensor. `check_heads` checks the number of ranks.
    """
    group, block_format = build.group, build.divided_format(out, num_heads * dim)
    block = 1 if block_format is None else inputs_of_cut(block_format, num_heads * dim)
    if block_format is not None and _cuts(group.size, num_heads, num_kv_heads, dim, block):
        works = [
            str(size)
            for size in _sizes(num_heads, num_kv_heads)
            if not _cuts(size, num_heads, num_kv_heads, dim, block)
        ]
        raise StartupError(
            f"tensor '{out}': its {num_heads * dim} inputs are in {block_format.name} blocks of "
            f"{block}, which --tensor-parallel-size {group.size} would cut: use one of "
            f"{', '.join(works)}, or {build.format_remedy(out, num_heads * dim)}."
        )
    return _share(group, num_heads, num_kv_heads, dim)


def check_heads(model: str, num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raise StartupError if the heads cannot be divided among this many ranks."""
    sizes = list(_sizes(num_heads, num_kv_heads))
    if num_ranks in sizes:
        return
    multiples = ", ".join(str(size) for size in sizes if size > num_kv_heads)
    raise StartupError(
        f"--tensor-parallel-size {num_ranks} cannot divide the {num_heads} query heads and {num_kv_heads} KV heads of "
        f"{model}: use at most {num_kv_heads}{', or ' if multiples else ''}{multiples}."
    )


def _sizes(num_heads: int, num_kv_heads: int) -> Iterator[int]:
    """Yield the numbers of ranks that can divide the heads; above `num_kv_heads`, only its multiples."""
    yield from range(1, num_kv_heads)
    yield from range(num_kv_heads, num_heads + 1, num_kv_heads)


def _share(group: Group, num_heads: int, num_kv_heads: int, dim: int) -> RankHeads:
    per_key = num_heads // num_kv_heads
    if group.size <= num_kv_heads:
        keys = group.share(num_kv_heads)
        queries = range(keys.start * per_key, keys.stop * per_key)
        return RankHeads(queries=queries, keys=keys, dim=dim, copies=1)
    copies = group.size // num_kv_heads
    key, copy = divmod(group.rank, copies)
    part = Group(copy, copies).share(per_key)
    queries = range(key * per_key + part.start, key * per_key + part.stop)
    return RankHeads(queries=queries, keys=range(key, key + 1), dim=dim, copies=copies)


def _cuts(num_ranks: int, num_heads: int, num_kv_heads: int, dim: int, block: int) -> bool:
    ranks = (Group(rank, num_ranks) for rank in range(num_ranks))
    return any(_share(each, num_heads, num_kv_heads, dim).query_values.start % block for each in ranks)
