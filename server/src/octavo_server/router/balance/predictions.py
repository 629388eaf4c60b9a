"""`Predictions`: what replicas will have because requests were just sent there, as expiring entries of the index.

By us, or by others: replicas tell of every request that comes to them. What is predicted already isn't predicted once
more by that, and so our own requests aren't.

A block that the replica's stream then names is no longer predicted (the index sees to that). The others go when the
last request that predicted them has expired or failed. A replica without a stream has a slot of its own here, and what
was sent there is believed for longer, as nothing will ever confirm it. There is a limit to how much is predicted at
once: beyond it what would expire first goes early.

What is added waits for `settle`, as the request needn't: a long prompt's hundreds of blocks take the index a good part
of a millisecond.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from octavo_server.router.fleet.local_load import Predicted
from octavo_server.router.fleet.prefix_index import PREDICTED, PrefixIndex, Slot

if TYPE_CHECKING:
    from octavo_server.router.fleet.block_mirror import BlockMirror
    from octavo_server.router.fleet.replica import Replica


MAX_BLOCKS = 250_000  # some 30 MB


class Prediction:
    """Of one request."""

    __slots__ = ("hashes", "is_over", "is_settled", "of")

    def __init__(self, of: Predicted, hashes: Sequence[int]) -> None:
        self.of = of
        self.hashes = hashes
        self.is_settled = False  # and so in the index
        self.is_over = False


class Predictions:
    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._order = count()
        self._expiring: list[tuple[float, int, Prediction]] = []
        self._waiting: list[Prediction] = []
        self._blind: dict[Replica, Predicted] = {}
        self._num_blocks = 0  # of all predictions that aren't over

    def slot(self, replica: "Replica") -> Slot:
        """Where the index has what this replica has, as far as that can be known now."""
        return self._of(replica).slot

    def add(self, replica: "Replica", hashes: Sequence[int], expires_at: float) -> Prediction:
        prediction = Prediction(self._of(replica), hashes)
        heapq.heappush(self._expiring, (expires_at, next(self._order), prediction))
        self._waiting.append(prediction)
        self._num_blocks += len(hashes)
        return prediction

    def told(self, replica: "Replica", hashes: Sequence[int], *, now: float, expires_at: float) -> None:
        """By the replica: a request came there that will have these blocks computed."""
        self.settle(now)
        of = self._of(replica)
        known = self._index.store(of.slot, hashes, PREDICTED)
        if len(known) == len(hashes):
            return
        left_out = {*known}
        prediction = Prediction(of, [block_hash for block_hash in hashes if block_hash not in left_out])
        prediction.is_settled = True
        heapq.heappush(self._expiring, (expires_at, next(self._order), prediction))
        self._num_blocks += len(prediction.hashes)

    def settle(self, now: float) -> None:
        """Before anybody asks what is predicted: what was added goes into the index, what has expired out of it."""
        waiting, expiring = self._waiting, self._expiring
        if waiting:
            self._waiting = []
            for prediction in waiting:
                self._enter(prediction)
        while expiring and (expiring[0][0] <= now or self._num_blocks > MAX_BLOCKS):
            self.end(heapq.heappop(expiring)[2])

    def end(self, prediction: Prediction) -> None:
        """Its blocks are no longer predicted by this request; any number of times."""
        if prediction.is_over:
            return
        prediction.is_over = True
        hashes, prediction.hashes = prediction.hashes, ()
        self._num_blocks -= len(hashes)
        if prediction.is_settled and prediction.of.is_believed:
            self._index.remove(prediction.of.slot, _no_longer(hashes, prediction.of.repeated), PREDICTED)

    def _enter(self, prediction: Prediction) -> None:
        if prediction.is_over or not prediction.of.is_believed:
            return
        prediction.is_settled = True
        repeated = prediction.of.repeated
        for block_hash in self._index.store(prediction.of.slot, prediction.hashes, PREDICTED):
            repeated[block_hash] = repeated.get(block_hash, 0) + 1

    def _of(self, replica: "Replica") -> Predicted:
        blocks = replica.blocks if replica.is_exact else None
        predicted = replica.activity.predicted
        if predicted is None or predicted.blocks is not blocks or predicted.is_over:
            predicted = replica.activity.predicted = self._anew(replica, blocks)
        return predicted

    def _anew(self, replica: "Replica", blocks: "BlockMirror | None") -> Predicted:
        for other in [r for r in self._blind if r is replica or r.state == "gone"]:
            predicted = self._blind.pop(other)
            predicted.is_over = True
            self._index.give_up_slot(predicted.slot)
        if blocks is not None:
            return Predicted(blocks.slot, blocks)
        predicted = self._blind[replica] = Predicted(self._index.take_slot(), None)
        return predicted


def _no_longer(hashes: Sequence[int], repeated: dict[int, int]) -> Sequence[int]:
    """Those that no other request predicts; the others are predicted by one less now."""
    if repeated.keys().isdisjoint(hashes):
        return hashes
    gone: list[int] = []
    for block_hash in hashes:
        others = repeated.pop(block_hash, 0)
        if others > 1:
            repeated[block_hash] = others - 1
        elif not others:
            gone.append(block_hash)
    return gone
