"""The share of drafts that must be accepted for a step to gain from them."""

from octavo_engine.wire.plan import StepCosts


def least_share(num_seqs: int, costs: StepCosts) -> float:
    """Return the share from which a step of `num_seqs` decodes gains; 0 while nothing is measured.

    One more draft of each sequence adds the time of a token for each of them and, with a draft model, a step of that
    model. If all were accepted, it would save a step without drafts. No share gains from 1 on.
    """
    tokens_s = num_seqs * (costs.prefill_token_s - costs.draft_token_s)
    step_s = costs.step_s - costs.draft_step_s + tokens_s
    draft_s = tokens_s + costs.draft_step_s + num_seqs * costs.draft_token_s
    return draft_s / step_s if step_s > 0 else 0.0
