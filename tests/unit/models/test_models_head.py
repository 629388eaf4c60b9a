"""The head's logits are not rounded to the type of the model."""

import pytest
import torch
from octavo_engine.layers.embedding import Embedding
from octavo_engine.layers.head import LogitsHead, head_shares
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.shard import split_outputs
from octavo_engine.ops import native_linear
from octavo_engine.ops.group import Group
from octavo_engine.ops.native_blocks import BLOCK_FORMATS
from octavo_engine.ops.quantise import quantised_slices
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


@pytest.mark.parametrize("blocks", [False, True], ids=["dense", "blocks"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_have_the_logits_of_their_rows_of_a_tied_table(num_ranks: int, blocks: bool) -> None:
    vocab, size = 259, 64
    formats = {"embed.weight": BLOCK_FORMATS["Q8_0"]} if blocks else {}
    build = BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=8, block_formats=formats)
    if blocks and native_linear.native_library() is None:
        pytest.skip("the kernels are not available")
    table = Embedding("embed", vocab, size, build)
    (slot,) = table.weight_slots()
    values = torch.randn(vocab, size, generator=torch.Generator().manual_seed(0))
    slot.load(next(iter(quantised_slices(values, BLOCK_FORMATS["Q8_0"])))[1] if blocks else values)
    hidden = torch.randn(5, size).bfloat16()

    def logits(group: Group) -> Tensor:
        rows = head_shares(group, vocab)[group.rank]
        spec = LinearSpec(
            in_features=size, outs=(vocab,), names=("lm_head",), wide=True, shard=split_outputs(group, rows)
        )
        linear = Linear(spec, build, tied=table.rows(rows))
        linear.finish_loading()
        return LogitsHead(linear, softcap=20.0)(hidden)

    expected = logits(Group())
    gathered, *others = run_ranks(num_ranks, logits)
    assert torch.equal(gathered, expected)
    assert [each.shape for each in others] == [(5, 0)] * (num_ranks - 1)
