"""`PromptShares`: divides the tokens and the time of one step between its prompts, so that no prompt delays another.

Half of the step is reserved for the prompt that is first in the order of service, or less if it needs less. Each later
prompt gets all that is left if two steps can finish it, otherwise half, so that prompts after it get a share, too. The
first prompt also gets what remains. Times are predicted from `StepCosts`, so equal inputs give equal shares.
"""

from octavo_engine.wire.plan import SeqStep, StepCosts

#: Tokens of all prompts in a step while costs are unmeasured: enough to measure them.
UNMEASURED_TOKENS = 128
#: Minimum share of a prompt that this share finishes in two steps, however slow the machine is.
MIN_CHUNK_TOKENS = 16
#: Minimum time of prompts, relative to the rest of the step: they advance even if decodes alone exceed the limit.
MIN_SHARE = 1.0
#: Like `MIN_SHARE`, for a prompt that delays no other sequence: the rest then takes a sixteenth of the step. A request
#: that arrives during the step has to wait for its end.
MIN_SHARE_ALONE = 15.0


class PromptShares:
    """The shares of one step. `max_step_s`: time limit of the step. `decodes`: the plan's entries that are no prompts.

    The order of calls is `reserve_first`, then `later` and `spend` for each later prompt, then `first`. `take` may be
    called at any time.
    """

    def __init__(self, max_step_s: float, costs: StepCosts, decodes: list[SeqStep]) -> None:
        self._costs = costs
        self._rest_s = costs.step_s + sum([costs.chunk_s(step.start, step.num_computed) for step in decodes])
        self._left_s = max(max_step_s - self._rest_s, MIN_SHARE * self._rest_s)
        self._reserved_s = self._least_first_s = 0.0

    def reserve_first(self, start: int, todo: int, budget: int) -> int:
        """Reserve up to half of the step for the first prompt; return how many tokens of `budget` that takes."""
        need_s = self._costs.chunk_s(start, todo)
        self._reserved_s = min(need_s, self._left_s / 2)
        # The first prompt pays for short prompts that exceed their time, unless this step completes it.
        self._least_first_s = need_s if need_s <= self._reserved_s else self._reserved_s / 2
        self._left_s -= self._reserved_s
        return min(todo, -(-budget // 2))

    def later(self, start: int, todo: int, budget: int) -> int:
        """Return how many of `todo` tokens from `start` on a later prompt may compute; 0 if no time is left."""
        if self._left_s <= 0:
            return 0
        short = todo <= budget and self._costs.chunk_s(start, todo) <= 2 * self._left_s
        seconds, tokens = (self._left_s, budget) if short else (self._left_s / 2, -(-budget // 2))
        least = MIN_CHUNK_TOKENS if todo <= 2 * MIN_CHUNK_TOKENS else 1
        return min(todo, budget, max(self._within(start, seconds, tokens), least))

    def spend(self, start: int, num_tokens: int) -> None:
        self._left_s -= self._costs.chunk_s(start, num_tokens)

    def take(self, seconds: float) -> bool:
        """Take time from the prompts for other work; return False if less time is left."""
        if seconds > self._left_s:
            return False
        self._left_s -= seconds
        return True

    def first(self, start: int, todo: int, budget: int, *, alone: bool) -> int:
        """Return how many tokens the first prompt computes, at least one. `alone`: no other sequence is delayed."""
        left_s = max(self._left_s + self._reserved_s, self._least_first_s)
        if alone:
            left_s = max(left_s, MIN_SHARE_ALONE * self._rest_s)
        num_tokens = min(todo, self._within(start, left_s, budget))
        self._left_s = left_s - self._costs.chunk_s(start, num_tokens)
        return num_tokens

    def _within(self, start: int, seconds: float, budget: int) -> int:
        if not self._costs.prefill_token_s:
            return budget
        return min(budget, max(1, self._costs.tokens_within(start, seconds)))
