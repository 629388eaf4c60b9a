"""`StepTimeModel`: the duration of a replica's steps as a linear function of their tokens, fitted online.

The fit is exponentially weighted least squares. The slope is drawn towards that of all replicas with the same models
while a replica's own steps determine little (no step yet, or all steps of one size). A full chunk is assumed to take at
least twice as long as a step without tokens: on a busy machine a short step may take longer than a long one, and
prefill would look free. A step that took far longer than expected, say because of a compilation, counts as four times
the expected time, so a lasting change shows after a few steps. While the slope isn't the replica's own, no step is
limited: after one short step every prompt would look like an outlier.

The standard error measures the uncertainty of the slope: it is large for few steps, and for steps that scatter widely.
"""

from math import sqrt

PRIOR_TOKEN_S = 0.0002
_FORGET = 0.98
_HELD = 2000.0  # weight of the prior slope, as variance of the number of tokens (tokens squared)
_OUTLIER = 4.0
_CHUNK_TOKENS = 2048
_MIN_TOKEN_S = 1e-9
_ALIKE, _MOST_UNLIKE = 1.5, 4.0  # speeds up to the first ratio count as equal; the second is the largest ratio used
_SURE = 2.0  # assumed error of the slope in standard errors, to either side
_SCATTER = 0.25  # least scatter, relative to a step's time: two steps always fit a line exactly


class StepTimeModel:
    """`is_own`: the slope rests more on the replica's own steps than on the shared slope. Until then the shared slope
    is the better estimate, as this model was drawn towards an older state of it, at the replica's last step.
    """

    __slots__ = (
        *("_count", "_pairs", "_squared_times", "_squares", "_times", "_tokens"),
        *("error_s", "is_own", "num_steps", "step_s", "token_s"),
    )

    def __init__(self) -> None:
        self.step_s = 0.0  # time of a step without tokens
        self.token_s = PRIOR_TOKEN_S  # additional time for each token
        self.error_s = 0.0  # `_SURE` standard errors of `token_s`
        self.num_steps = 0
        self.is_own = False
        self._count = self._tokens = self._times = self._squares = self._squared_times = self._pairs = 0.0

    def learn(self, tokens: int, took_s: float, usual_token_s: float) -> None:
        if self.is_own:
            took_s = min(took_s, _OUTLIER * (self.step_s + self.token_s * tokens))
        self.num_steps += 1
        self._count = _FORGET * self._count + 1
        self._tokens = _FORGET * self._tokens + tokens
        self._times = _FORGET * self._times + took_s
        self._squares = _FORGET * self._squares + tokens * tokens
        self._squared_times = _FORGET * self._squared_times + took_s * took_s
        self._pairs = _FORGET * self._pairs + tokens * took_s
        self._fit(usual_token_s)

    def likely_token_s(self, usual_s: float) -> float:
        """Expected seconds per token. Replicas of one model count as equally fast unless their steps differ clearly: by
        more than a factor of `_ALIKE` beyond the slope's error. Equal replicas on a busy machine differ by as much, and
        a replica that looks fast by chance would get all requests.
        """
        if not self.is_own:
            return usual_s
        ratio = min(max(usual_s, self.token_s - self.error_s), self.token_s + self.error_s) / usual_s
        if ratio > 1:
            return usual_s * min(max(ratio / _ALIKE, 1.0), _MOST_UNLIKE)
        return usual_s * max(min(ratio * _ALIKE, 1.0), 1 / _MOST_UNLIKE)

    def _fit(self, usual_token_s: float) -> None:
        mean_tokens, mean_s = self._tokens / self._count, self._times / self._count
        variance = self._squares - self._tokens * mean_tokens
        covariance = self._pairs - self._tokens * mean_s
        slope = max((covariance + _HELD * usual_token_s) / (variance + _HELD), mean_s / (_CHUNK_TOKENS + mean_tokens))
        intercept = mean_s - slope * mean_tokens
        if intercept < 0:
            slope, intercept = self._pairs / self._squares, 0.0
        self.token_s, self.step_s, self.is_own = max(slope, _MIN_TOKEN_S), intercept, variance >= _HELD
        self.error_s = _SURE * sqrt(self._scatter() / (variance + _HELD))

    def _scatter(self) -> float:
        a, b = self.step_s, self.token_s
        on_line = a * a * self._count + 2 * a * b * self._tokens + b * b * self._squares
        beside = self._squared_times - 2 * (a * self._times + b * self._pairs) + on_line
        return max(beside, _SCATTER * _SCATTER * self._squared_times) / self._count
