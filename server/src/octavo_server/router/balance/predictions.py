"""`Predictions`: expiring index entries for blocks that replicas will soon hold, as requests were just sent to them.

A prediction comes from a request of this router (`add`), or from a request of any router that the replica's KV stream
reports (`add_reported`). A reported block that is predicted already is not predicted twice, so this router's own
requests count once.

When the replica's stream reports a block as stored, the stored block replaces its prediction. Another block stays
predicted until each prediction with it has expired or its request has failed. A polled replica has an index slot with
predictions only, and they last longer there, as no stream will confirm them. The number of predicted blocks is
limited: beyond the limit, the predictions that expire first are removed early.

Predictions enter the index at the next `update_index`, so that the request needn't wait: to store the hundreds of
blocks of a long prompt takes a good part of a millisecond.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from octavo_server.router.fleet.local_load import PredictedBlocks
from octavo_server.router.fleet.prefix_index import PREDICTED, PrefixIndex, Slot

if TYPE_CHECKING:
    from octavo_server.router.fleet.block_mirror import BlockMirror
    from octavo_server.router.fleet.replica import Replica


MAX_BLOCKS = 250_000  # about 30 MB of memory


class Prediction:
    __slots__ = ("hashes", "is_indexed", "is_over", "predicted")

    def __init__(self, predicted: PredictedBlocks, hashes: Sequence[int]) -> None:
        self.predicted = predicted
        self.hashes = hashes
        self.is_indexed = False
        self.is_over = False


class Predictions:
    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._order = count()
        self._expiring: list[tuple[float, int, Prediction]] = []
        self._waiting: list[Prediction] = []
        self._polled: dict[Replica, PredictedBlocks] = {}
        self._num_blocks = 0  # blocks of all predictions that haven't ended

    def slot(self, replica: "Replica") -> Slot:
        """Index slot of the replica: the one that its KV stream feeds if it is exact, else one of predictions only."""
        return self._predicted_blocks(replica).slot

    def add(self, replica: "Replica", hashes: Sequence[int], expires_at: float) -> Prediction:
        prediction = Prediction(self._predicted_blocks(replica), hashes)
        heapq.heappush(self._expiring, (expires_at, next(self._order), prediction))
        self._waiting.append(prediction)
        self._num_blocks += len(hashes)
        return prediction

    def add_reported(self, replica: "Replica", hashes: Sequence[int], *, now: float, expires_at: float) -> None:
        self.update_index(now)
        predicted = self._predicted_blocks(replica)
        repeated = {*self._index.store(predicted.slot, hashes, PREDICTED)}
        if len(repeated) == len(hashes):
            return
        prediction = Prediction(predicted, [block_hash for block_hash in hashes if block_hash not in repeated])
        prediction.is_indexed = True
        heapq.heappush(self._expiring, (expires_at, next(self._order), prediction))
        self._num_blocks += len(prediction.hashes)

    def update_index(self, now: float) -> None:
        """Store added predictions in the index, and remove expired ones. To be called before a match."""
        waiting, expiring = self._waiting, self._expiring
        if waiting:
            self._waiting = []
            for prediction in waiting:
                self._store_prediction(prediction)
        while expiring and (expiring[0][0] <= now or self._num_blocks > MAX_BLOCKS):
            self.end(heapq.heappop(expiring)[2])

    def end(self, prediction: Prediction) -> None:
        """Remove the prediction, because its request failed or its time is over. Later calls do nothing."""
        if prediction.is_over:
            return
        prediction.is_over = True
        hashes, prediction.hashes = prediction.hashes, ()
        self._num_blocks -= len(hashes)
        if prediction.is_indexed and prediction.predicted.is_valid:
            self._index.remove(prediction.predicted.slot, _unshared(hashes, prediction.predicted.repeated), PREDICTED)

    def _store_prediction(self, prediction: Prediction) -> None:
        if prediction.is_over or not prediction.predicted.is_valid:
            return
        prediction.is_indexed = True
        repeated = prediction.predicted.repeated
        for block_hash in self._index.store(prediction.predicted.slot, prediction.hashes, PREDICTED):
            repeated[block_hash] = repeated.get(block_hash, 0) + 1

    def _predicted_blocks(self, replica: "Replica") -> PredictedBlocks:
        blocks = replica.blocks if replica.is_exact else None
        predicted = replica.local_load.predicted
        if predicted is None or predicted.blocks is not blocks or predicted.is_over:
            predicted = replica.local_load.predicted = self._start_prediction_slot(replica, blocks)
        return predicted

    def _start_prediction_slot(self, replica: "Replica", blocks: "BlockMirror | None") -> PredictedBlocks:
        for other in [r for r in self._polled if r is replica or r.state == "gone"]:
            predicted = self._polled.pop(other)
            predicted.is_over = True
            self._index.release_slot(predicted.slot)
        if blocks is not None:
            return PredictedBlocks(blocks.slot, blocks)
        predicted = self._polled[replica] = PredictedBlocks(self._index.acquire_slot(), None)
        return predicted


def _unshared(hashes: Sequence[int], repeated: dict[int, int]) -> Sequence[int]:
    """Return the hashes that no other request predicts, and decrement the counts of the other hashes in `repeated`."""
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
