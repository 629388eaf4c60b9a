"""Equal tokens are ordered by their ids, alone and in crowds: all lists and ranks of log-probabilities equal a sort."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.frontend.beam_search import BeamSearch, BeamSearchParams
from octavo_engine.frontend.output_stream import position_logprobs
from octavo_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo_engine.frontend.request_builder import TokenizedPrompt
from octavo_engine.ops.sampling import ranks_natively
from octavo_engine.sampling import logprobs as module
from octavo_engine.sampling.logprobs import logprobs_of_ids, prompt_logprobs, token_logprobs
from octavo_engine.wire.records import TokenLogprobs
from torch import Tensor

NEVER = float("-inf")


@pytest.fixture(params=[ranks_natively, lambda logits, ids: None], ids=["native", "torch"])
def _ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ranks_natively", request.param)


def patterns(count: int) -> Iterator[Tensor]:
    """Yield rows of 40 to 400 logits with few different values, among them both zeros and minus infinity."""
    draw = torch.Generator().manual_seed(7)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    for _ in range(count):
        vocab, levels = number(40, 400), number(1, 7)
        values = torch.randn(levels, generator=draw).mul(4).round() / number(1, 4)
        values[number(0, levels)] = (NEVER, 0.0, -0.0, 3.0)[number(0, 4)]
        values[0] = values[0].clamp(min=-9)  # a token is left
        yield values[torch.randint(0, levels, (vocab,), generator=draw)].index_fill(
            0, torch.tensor([number(0, vocab)]), 1
        )


def by_sort(row: Tensor) -> list[int]:
    """Return all ids, the most likely first, equal ones by id."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def check(entry: TokenLogprobs, row: Tensor, chosen: int, num_top: int) -> None:
    order, logprobs = by_sort(row), row.log_softmax(-1)
    assert entry.token_ids == [chosen, *order[:num_top]]
    assert entry.rank == order.index(chosen) + 1
    assert entry.logprobs == pytest.approx(logprobs[entry.token_ids].tolist(), abs=1e-5)


@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize("num_top", [0, 1, 3, 20, 39])
def test_lists_equal_a_sort_alone_and_in_crowds(num_top: int) -> None:
    for index, row in enumerate(patterns(200)):
        chosen = [(37 * index + i) % len(row) for i in range(4)]
        rows = [row.flip(0), row, row.roll(index), row * 0 if row.isfinite().all() else row]
        crowd = torch.stack(rows)
        together = token_logprobs(crowd, torch.tensor(chosen), [1, num_top, len(row), 5]).entries()
        (alone,) = token_logprobs(row[None], torch.tensor(chosen[1:2]), [num_top]).entries()
        assert alone.token_ids == together[1].token_ids
        for entry, each, token, size in zip(together, rows, chosen, [1, num_top, len(row), 5], strict=True):
            check(entry, each, token, size)
        for entry, each, token in zip(prompt_logprobs(crowd, chosen, num_top), rows, chosen, strict=True):
            check(entry, each, token, num_top)


@pytest.mark.usefixtures("_ranks")
def test_ranks_of_requested_ids_equal_a_sort() -> None:
    for index, row in enumerate(patterns(200)):
        ids = [(11 * index + 3 * i) % len(row) for i in range(index % 13 + 1)]
        rows, chosen = torch.stack([row.flip(0), row, row.roll(index)]), [ids[-1], ids[0], index % len(row)]
        entries = logprobs_of_ids(rows, torch.tensor(chosen), ids)
        for entry, each, token in zip(entries, rows, chosen, strict=True):
            order = by_sort(each)
            assert entry.token_ids == [token, *ids]
            assert entry.ranks == [order.index(token) + 1 for token in entry.token_ids]
            assert entry.rank == entry.ranks[0]
            assert entry.logprobs == pytest.approx(each.log_softmax(-1)[entry.token_ids].tolist(), abs=1e-5)


@given(st.lists(st.sampled_from([-0.0, 0.0, 1.0, 1.0000001, -3e38, 3e38]), min_size=2, max_size=30))
def test_all_sizes_of_a_list_begin_alike(values: list[float]) -> None:
    row = torch.tensor([values])
    for size in range(1, len(values) + 1):
        (entry,) = token_logprobs(row, torch.tensor([0]), [size], as_logits=True).entries()
        assert entry.token_ids[1:] == by_sort(row[0])[:size]


def test_beams_take_the_lowest_ids_of_equal_tokens() -> None:
    """Whichever of the equal tokens a temperature has drawn, the beams are those of a sort."""
    row = torch.zeros(60)
    for chosen in (0, 1, 3, 59):
        (entry,) = token_logprobs(row[None], torch.tensor([chosen]), [6]).entries()
        prompt = TokenizedPrompt(text=None, token_ids=[7])
        search = BeamSearch(prompt, BeamSearchParams(3, 5, temperature=1.0), eos_token_id=None, max_model_len=9)
        position = position_logprobs(entry, None)
        output = CompletionOutput(index=0, text="", token_ids=[chosen], logprobs=[position])
        search.advance(
            [
                RequestOutput(
                    request_id="r",
                    prompt=None,
                    prompt_token_ids=[7],
                    outputs=[output],
                    finished=True,
                    metrics=RequestMetrics(arrival_s=0),
                )
            ]
        )
        assert [each.token_ids for each in search.prompts()] == [[7, 0], [7, 1], [7, 2]]
