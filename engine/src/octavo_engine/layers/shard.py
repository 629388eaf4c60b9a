"""The part of a weight that a rank holds, for tensor parallelism."""

from dataclasses import dataclass, field

from torch import Tensor

from octavo_engine.ops.native_quantised import PANEL
from octavo_engine.ops.rank_group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A split of a layer's outputs or inputs among ranks. `outs`: this rank's range of each part's outputs; (): all.

    `inputs`: this rank's range of inputs; None: all. Split inputs give partial sums; only rank 0 adds the bias.
    `adds_up`: the layer sums them over the ranks; otherwise its caller does.
    """

    group: Group = field(default_factory=Group)
    outs: tuple[range, ...] = ()
    inputs: range | None = None
    adds_up: bool = False

    @property
    def owns_bias(self) -> bool:
        return self.inputs is None or self.group.rank == 0

    def outputs(self, part: int, size: int) -> range:
        """Return the rank's outputs of a part that has `size` outputs."""
        return self.outs[part] if self.outs else range(size)

    def cut_inputs(self, weight: Tensor, num_values: int = 1, num_columns: int = 1) -> Tensor:
        """Return this rank's columns of a weight [out, in], where `num_columns` columns hold `num_values` inputs."""
        if self.inputs is None:
            return weight
        first, last = (at // num_values * num_columns for at in (self.inputs.start, self.inputs.stop))
        return weight[:, first:last]


def split_outputs(group: Group, *outs: range) -> Shard:
    return Shard(group=group, outs=outs)


def split_inputs(group: Group, inputs: range, *, adds_up: bool = True) -> Shard:
    return Shard(group=group, inputs=inputs, adds_up=adds_up)


def vocabulary_shares(group: Group, vocab_size: int) -> list[range]:
    """Return the rows of the embedding and of the logits head that each rank has: whole panels of the kernels."""
    return group.shares(vocab_size, PANEL)
