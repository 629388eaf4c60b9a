"""`RetryBudget` bounds retries to a share of all requests (after Finagle), so that an overload is not multiplied.

Each request deposits a fifth of a retry. A full budget covers the requests in flight on a replica that dies.
"""

REQUESTS_PER_RETRY = 5
MAX_RETRIES = 1000


class RetryBudget:
    def __init__(self) -> None:
        self._deposits = MAX_RETRIES * REQUESTS_PER_RETRY

    def deposit(self) -> None:
        self._deposits = min(self._deposits + 1, MAX_RETRIES * REQUESTS_PER_RETRY)

    def withdraw(self) -> bool:
        """Whether a retry is allowed; if so, it is taken from the budget."""
        if self._deposits < REQUESTS_PER_RETRY:
            return False
        self._deposits -= REQUESTS_PER_RETRY
        return True
