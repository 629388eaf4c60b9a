"""The head's logits are not rounded to the type of the model."""

import pytest
import torch
from octavo_engine.layers.embedding import Embedding
from octavo_engine.layers.head import LogitsHead
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.shard import split_outputs
from octavo_engine.ops import native_linear
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS
from octavo_engine.ops.quantise import quantised_slices
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.recording import Pool, record
from octavo_testing.onednn import install_other_onednn
from octavo_testing.ranks import run_ranks
from torch import Tensor


def head_of(weight: Tensor, *, tied: bool, softcap: float | None = None) -> LogitsHead:
    build = BuildContext(dtype=weight.dtype, device=torch.device("cpu"), max_model_len=8)
    spec = LinearSpec(in_features=weight.shape[1], outs=(weight.shape[0],), names=("lm_head",), wide=True)
    linear = Linear(spec, build, tied=weight if tied else None)
    for slot in linear.weight_slots():
        slot.load(weight)
    linear.finish_loading()
    return LogitsHead(linear, softcap=softcap)


@pytest.fixture(params=["as-here", "without-kernels", "other-onednn"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without-kernels":
        monkeypatch.setattr(native_linear, "native_library", lambda: None)
    elif request.param == "other-onednn":
        install_other_onednn(monkeypatch)


@pytest.mark.usefixtures("machine")
def test_logits_that_tie_in_bfloat16_stay_different() -> None:
    weight = torch.tensor([[16.0, 0.0625], [16.0, 0.125], [0.0, 0.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[1.0, 0.25]], dtype=torch.bfloat16)
    rounded = (hidden @ weight.T).float()
    assert rounded[0, 0] == rounded[0, 1], "precondition: both round to the same step"
    assert head_of(weight, tied=True)(hidden).tolist() == [[16.015625, 16.03125, 0.0]]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_every_logit_is_as_exact_as_fp32(rows: int, tied: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(101, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    exact = hidden.float() @ weight.float().T
    logits = head_of(weight, tied=tied)(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, exact, atol=1e-4, rtol=1e-5)


def test_softcap_comes_last() -> None:
    weight, hidden = torch.tensor([[100.0], [1.0]]), torch.tensor([[1.0]])
    want = 30.0 * torch.tanh(torch.tensor([[100.0, 1.0]]) / 30.0)
    torch.testing.assert_close(head_of(weight, tied=True, softcap=30.0)(hidden), want)


def test_an_adapter_adds_to_logits_that_were_not_rounded() -> None:
    weight = torch.tensor([[16.0, 0.0625], [16.0, 0.125]], dtype=torch.bfloat16)
    head = head_of(weight, tied=True)
    head.linear.adapter = lambda x, parts: parts[0].add_(0.25)  # its return value is not used
    assert head(torch.tensor([[1.0, 0.25]], dtype=torch.bfloat16)).tolist() == [[16.265625, 16.28125]]


VALUES = torch.randn(259, 64, generator=torch.Generator().manual_seed(0))


def part_of_table(group: Group, blocks: bool) -> Embedding:
    if blocks and native_linear.native_library() is None:
        pytest.skip("the kernels are not available")
    formats = {"embed.weight": QUANTISED_FORMATS["Q8_0"]} if blocks else {}
    cpu = torch.device("cpu")
    build = BuildContext(dtype=torch.bfloat16, device=cpu, max_model_len=8, block_formats=formats, group=group)
    table = Embedding("embed", *VALUES.shape, build, scale=3.0)
    (slot,) = table.weight_slots()
    slot.load(next(iter(quantised_slices(VALUES, QUANTISED_FORMATS["Q8_0"])))[1] if blocks else VALUES)
    table.finish_loading()
    return table


@pytest.mark.parametrize("blocks", [False, True], ids=["dense", "blocks"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_divide_a_table_and_its_tied_head(num_ranks: int, blocks: bool) -> None:
    hidden, ids = torch.randn(5, 64).bfloat16(), torch.tensor([0, 258, 31, 32, 128, 5])
    build = BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=8)

    def run(group: Group) -> tuple[int, Tensor, Tensor]:
        table = part_of_table(group, blocks)
        shard = split_outputs(group, table.rows)
        spec = LinearSpec(in_features=64, outs=(259,), names=("lm_head",), wide=True, shard=shard)
        linear = Linear(spec, build, tied=table.weight)
        linear.finish_loading()
        return table.weights_bytes(), table(ids), LogitsHead(linear, softcap=20.0)(hidden)

    num_bytes, rows, logits = run(Group())
    ranks = run_ranks(num_ranks, run)
    assert sum(each[0] for each in ranks) == num_bytes
    assert max(each[0] for each in ranks) <= num_bytes / num_ranks * 1.3
    assert all(torch.equal(each[1], rows) for each in ranks)
    assert torch.equal(ranks[0][2], logits)
    assert [each[2].shape for each in ranks[1:]] == [(5, 0)] * (num_ranks - 1)


@pytest.mark.skipif(native_linear.native_library() is None, reason="only kernels are recorded")
@pytest.mark.parametrize("blocks", [False, True], ids=["dense", "blocks"])
def test_a_replayed_recording_looks_up_and_adds_up_again(blocks: bool) -> None:
    first, other = torch.tensor([0, 258, 31]), torch.tensor([200, 7, 128])

    def run(group: Group) -> Tensor:
        table, ids = part_of_table(group, blocks), first.clone()
        with record(Pool(), ids) as recording:
            rows = table(ids)
        assert recording.refused is None
        ids.copy_(other)
        recording.replay()
        return rows.clone()

    expected = part_of_table(Group(), blocks)(other)
    assert all(torch.equal(rows, expected) for rows in run_ranks(2, run))
