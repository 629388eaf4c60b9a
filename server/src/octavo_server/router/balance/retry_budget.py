"""`RetryBudget` bounds retries to a share of all requests (after Finagle), so that an overload is not multiplied.

Each request deposits a fifth of a retry. A full budget covers the requests in flight on a replica that dies.
"""

DEPOSIT = 0.2
MAX_RETRIES = 1000.0


class RetryBudget:
    def __init__(self) -> None:
        self._left = MAX_RETRIES

    def deposit(self) -> None:
        self._left = min(self._left + DEPOSIT, MAX_RETRIES)

    def withdraw(self) -> bool:
        """Whether a retry is allowed; if so, it is taken from the budget."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
