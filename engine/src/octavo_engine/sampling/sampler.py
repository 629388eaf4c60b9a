"""`Sampler`: chooses tokens from logits with every field of `SamplingParams`, in vLLM's order of operations.

The grammar's mask is applied first, then raw log-probabilities are computed (those of the other modes at the end); then
allowed ids, bad words, min_tokens, logit bias and penalties change the rows that use them. Greedy rows choose the
largest logit (the lowest id among equal logits); other rows divide by their temperature, apply min-p, top-k and top-p,
and draw (`draws`). A row's token depends on its logits, parameters, seed and position, never on other rows.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.devices.transfers import Copy, Fetch, fetch_now, keep
from octavo_engine.ops.sampling import DRAW, make_draw
from octavo_engine.sampling.draws import choose_tokens, draw_keys, seed_keys
from octavo_engine.sampling.grammar_masks import GrammarRows
from octavo_engine.sampling.logit_edits import PenaltyCounts, apply_penalties
from octavo_engine.sampling.logprobs import logprobs_of_ids, processed_logits, token_logprobs
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.settings.records import LogprobsMode
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.plan import SeqResult
from octavo_engine.wire.records import ErrorInfo, TokenLogprobs

_LOGGER = logging.getLogger(__name__)

NO_TOKEN = -1  # marks a row without a finite logit
_BROKEN = -2  # marks a row whose logits were not finite before masks, which may hide that
NOT_FINITE = ErrorInfo("The model's logits are not finite (NaN or infinity): the weights or the dtype overflow.")
NO_TOKEN_LEFT = ErrorInfo("The request's token masks leave no token to choose.", "invalid_request")
NO_TOKEN_IN_GRAMMAR = ErrorInfo(
    "The request's grammar and its other token masks leave no token to choose.", "invalid_request"
)
_NO_LOGPROBS = TokenLogprobs([], [], 0)  # for a row with an error


class SamplingColumns:
    """Sampling parameters of all sequences, one array per field, indexed by slot."""

    def __init__(self, num_slots: int) -> None:
        self.draws = np.zeros(num_slots, dtype=DRAW)  # with the keys of the seeds
        self.edits_logits = np.zeros(num_slots, dtype=np.bool_)
        self.wants_logprobs = np.zeros(num_slots, dtype=np.bool_)

    def set(self, seq: SeqState, seed: int) -> None:
        slot, params = seq.slot, seq.params
        (key,) = seed_keys(np.array([seed & (2**64 - 1)], dtype=np.uint64))
        self.draws[slot] = make_draw(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, key=key
        )
        self.edits_logits[slot] = seq.counts is not None or seq.masks is not None
        self.wants_logprobs[slot] = params.wants_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Row i of the logits is for the token of `seqs[i]` at `positions[i]`, its number of earlier tokens.

    The last `num_drafts[i]` of these are drafts.
    """

    seqs: list[SeqState]
    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    num_drafts: npt.NDArray[np.int64]

    def part(self, begin: int, end: int) -> "SampleRows":
        at = slice(begin, end)
        return SampleRows(
            seqs=self.seqs[at], slots=self.slots[at], positions=self.positions[at], num_drafts=self.num_drafts[at]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """The tokens of rows, which a GPU may still compute. `on_device`: negative if the row's logits are not finite.

    `masked`: errors to report for rows whose masks may have excluded all tokens. `wanting`: rows that want `logprobs`.
    """

    rows: SampleRows
    on_device: Int[Tensor, " rows"]
    on_host: Callable[[], Tensor]
    errors: dict[int, ErrorInfo]
    masked: dict[int, ErrorInfo]
    wanting: list[int]
    logprobs: Callable[[], list[TokenLogprobs]]

    def results(self) -> list[SeqResult]:
        """Wait for the tokens; return one result per row."""
        tokens = self.on_host().tolist()
        empty = {row: self.masked.get(row, NOT_FINITE) for row, token in enumerate(tokens) if token == NO_TOKEN}
        errors = empty | self.errors | {row: NOT_FINITE for row, token in enumerate(tokens) if token == _BROKEN}
        seqs = self.rows.seqs
        results = [SeqResult(seq_id=seq.seq_id, token_ids=[token]) for seq, token in zip(seqs, tokens, strict=True)]
        for row, error in errors.items():
            results[row] = SeqResult(seq_id=seqs[row].seq_id, token_ids=[], error=error)
        for row, entry in zip(self.wanting, self.logprobs(), strict=True):
            results[row].logprobs = None if row in errors else [entry]
        return results


class Sampler:
    """`mode`: the values that requests get as log-probabilities. `copy`, `fetch`: copy between host and device.
    `counts`: counts of penalised tokens, if steps start before the host knows the newest tokens.

    The host waits for the device only if a row wants processed log-probabilities, or log-probabilities of given tokens.
    """

    def __init__(
        self,
        columns: SamplingColumns,
        mode: LogprobsMode = "raw_logprobs",
        *,
        copy: Copy = keep,
        fetch: Fetch = fetch_now,
        counts: PenaltyCounts | None = None,
    ) -> None:
        self._columns, self._counts = columns, counts
        self._mode = mode
        self._copy, self._fetch = copy, fetch

    def sample(
        self, logits: Float[Tensor, "rows vocab"], rows: SampleRows, grammar: GrammarRows | None = None
    ) -> ChosenTokens:
        """Choose a token per row. Overwrites the logits."""
        params = self._columns.draws[rows.slots]
        params["key"] = draw_keys(params["key"], rows.positions)
        edits = grammar is not None or self._columns.edits_logits[rows.slots].any()
        is_finite = logits.amax(-1).isfinite() if edits else None  # before a mask hides a NaN
        errors = dict[int, ErrorInfo]()
        if grammar is not None:
            grammar.apply(logits, self._copy)
            errors = {row: ErrorInfo(message, "invalid_request") for row, message in grammar.errors.items()}
        wanting = np.flatnonzero(self._columns.wants_logprobs[rows.slots])
        reported = self._take(logits, wanting) if len(wanting) else None
        masked, failed = self._edit(logits, rows)
        if grammar is not None:
            masked |= dict.fromkeys(grammar.rows, NO_TOKEN_IN_GRAMMAR)
        errors = failed | errors
        if reported is not None and self._mode.startswith("processed"):
            reported = processed_logits(self._take(logits, wanting), params[wanting])
        chosen = choose_tokens(logits, params, self._copy)
        if is_finite is not None:
            chosen.masked_fill_(~is_finite, _BROKEN)
        return ChosenTokens(
            rows=rows,
            on_device=chosen,
            on_host=self._fetch(chosen),
            errors=errors,
            masked=masked,
            wanting=wanting.tolist(),
            logprobs=list if reported is None else self._logprobs(reported, chosen, rows, wanting, errors),
        )

    def _take(self, values: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return a copy of some rows."""
        return values.index_select(0, self._copy(torch.from_numpy(rows)))

    def _edit(self, logits: Tensor, rows: SampleRows) -> tuple[dict[int, ErrorInfo], dict[int, ErrorInfo]]:
        """Apply masks, bias and penalties in place. Return the errors of rows whose tokens are all excluded, and the
        errors of rows that failed."""
        editing = np.flatnonzero(self._columns.edits_logits[rows.slots]).tolist()
        penalties, penalised_rows, entries = [], [], []
        masked, errors = dict[int, ErrorInfo](), dict[int, ErrorInfo]()
        for row in editing:
            seq, length = rows.seqs[row], int(rows.positions[row])
            with isolated(errors, row):
                if seq.masks is not None:
                    seq.masks.apply(logits[row], seq.output(length))
                    masked[row] = NO_TOKEN_LEFT
                if seq.counts is not None and self._counts is not None:
                    entries.append(self._counts.entry(row, seq.slot, seq.counts, seq.token_ids, length))
                elif seq.counts is not None:
                    penalties.append(seq.counts.penalty(seq.token_ids, length, int(rows.num_drafts[row])))
                    penalised_rows.append(row)
        if penalties:
            apply_penalties(logits, penalised_rows, penalties, self._copy)
        if entries and self._counts is not None:
            self._counts.apply(logits, entries)
        return masked, errors

    def _logprobs(
        self,
        logits: Tensor,
        chosen: Tensor,
        rows: SampleRows,
        wanting: npt.NDArray[np.int64],
        errors: dict[int, ErrorInfo],
    ) -> Callable[[], list[TokenLogprobs]]:
        as_logits = self._mode.endswith("logits")
        params = [rows.seqs[row].params for row in wanting.tolist()]
        chosen = self._take(chosen, wanting).clamp_(min=0)  # -1: a row with an error
        named: dict[int, list[int]] = {}  # rows by request, whose sequences share its parameters
        for i, each in enumerate(params):
            if each.logprob_token_ids:
                named.setdefault(id(each), []).append(i)
        if not named:
            num_top = [each.logprobs or 0 for each in params]
            return token_logprobs(logits, chosen, num_top, as_logits=as_logits, fetch=self._fetch).entries
        entries = dict[int, TokenLogprobs]()
        if others := [i for i, each in enumerate(params) if not each.logprob_token_ids]:
            num_top = [params[i].logprobs or 0 for i in others]
            of_others = token_logprobs(logits[others], chosen[others], num_top, as_logits=as_logits).entries()
            entries.update(zip(others, of_others, strict=True))
        for group in named.values():
            ids = params[group[0]].logprob_token_ids or []
            taken = (logits, chosen) if len(group) == len(params) else (logits[group], chosen[group])  # no copy of all
            with isolated(errors, *wanting[group].tolist()):
                entries.update(zip(group, logprobs_of_ids(*taken, ids, as_logits=as_logits), strict=True))
        return lambda: [entries.get(i, _NO_LOGPROBS) for i in range(len(params))]


@contextmanager
def isolated(errors: dict[int, ErrorInfo], *keys: int) -> Iterator[None]:
    """Catch an exception of the block; record it in `errors` under `keys`, so that other sequences continue."""
    try:
        yield
    except EngineDead:
        raise
    except Exception as error:
        _LOGGER.exception("the result of one sequence failed")
        errors |= dict.fromkeys(keys, ErrorInfo(f"The result failed: {type(error).__name__}: {error}"))
