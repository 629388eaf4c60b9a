import torch
from octavo_engine.layers.head import refine_largest


def test_logits_that_tie_in_bfloat16_are_told_apart() -> None:
    weight = torch.tensor([[16.0, 0.0625], [16.0, 0.125], [0.0, 0.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[1.0, 0.25]], dtype=torch.bfloat16)
    logits = (hidden @ weight.T).float()
    assert logits[0, 0] == logits[0, 1], "the premise: rounded to the same step"

    refine_largest(logits, hidden, weight)

    assert logits.tolist() == [[16.015625, 16.03125, 0.0]]


def test_only_the_largest_logits_are_computed_again() -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(100, 16).bfloat16(), torch.randn(4, 16).bfloat16()
    exact = hidden.float() @ weight.float().T
    rounded = exact.bfloat16().float()
    logits = rounded.clone()

    refine_largest(logits, hidden, weight)

    top = rounded.topk(8).indices
    torch.testing.assert_close(logits.gather(1, top), exact.gather(1, top))
    assert (logits != rounded).sum() <= 4 * 8
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
