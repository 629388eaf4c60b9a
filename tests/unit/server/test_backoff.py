import random

from octavo_server.backoff import Backoff


def test_the_wait_doubles_to_a_limit_and_resets_after_a_stable_try():
    backoff = Backoff(least_s=0.1, most_s=1.0, stable_s=5.0, dice=random.Random(1))
    for wanted in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert wanted / 2 <= backoff.next_wait_s(lasted_s=0.0) <= wanted
    assert backoff.next_wait_s(lasted_s=4.9) >= 0.5
    assert backoff.next_wait_s(lasted_s=5.0) <= 0.1
    assert 0.1 <= backoff.next_wait_s(lasted_s=0.0) <= 0.2
