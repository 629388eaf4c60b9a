"""`Rates`: how long a replica's steps take, by the tokens computed in them: a line, fitted as its frames come in.

Exponentially weighted least squares. Before anything is heard, and where all steps look alike, a prior holds the line
in place. It can't get a negative slope or intercept, and one step that took far longer than any before (a compilation,
say) counts as a few times the expected one: a lasting change comes through after a few steps.
"""

PRIOR_STEP_S = 0.01
PRIOR_TOKEN_S = 0.0002
_FORGET = 0.98
_PRIOR_WEIGHT = 0.5
_PRIOR_SPREAD_TOKENS = 64.0
_OUTLIER = 4.0
_MIN_TOKEN_S = 1e-7


class Rates:
    __slots__ = ("_sw", "_sx", "_sxx", "_sxy", "_sy", "num_steps", "step_s", "token_s")

    def __init__(self, step_s: float = PRIOR_STEP_S, token_s: float = PRIOR_TOKEN_S) -> None:
        self.step_s = step_s  # of a step without tokens
        self.token_s = token_s  # more for each token
        self.num_steps = 0
        self._sw = self._sx = self._sy = self._sxx = self._sxy = 0.0

    def learn(self, tokens: int, took_s: float) -> None:
        if self.num_steps:
            took_s = min(took_s, _OUTLIER * (self.step_s + self.token_s * tokens))
        self.num_steps += 1
        self._sw = _FORGET * self._sw + 1
        self._sx = _FORGET * self._sx + tokens
        self._sy = _FORGET * self._sy + took_s
        self._sxx = _FORGET * self._sxx + tokens * tokens
        self._sxy = _FORGET * self._sxy + tokens * took_s
        self._fit()

    def _fit(self) -> None:
        mean_tokens, mean_s = self._sx / self._sw, self._sy / self._sw
        variance = self._sxx - self._sx * mean_tokens
        covariance = self._sxy - self._sx * mean_s
        held = _PRIOR_WEIGHT * _PRIOR_SPREAD_TOKENS**2
        slope = max((covariance + held * self.token_s) / (variance + held), _MIN_TOKEN_S)
        intercept = mean_s - slope * mean_tokens
        if intercept < 0:
            slope, intercept = max(self._sxy / self._sxx, _MIN_TOKEN_S), 0.0
        self.token_s, self.step_s = slope, intercept
