import pytest
from octavo_server.router.fleet.step_time_model import PRIOR_TOKEN_S, StepTimeModel


def taught(steps):
    rates = StepTimeModel()
    for tokens, took_s in steps:
        rates.learn(tokens, took_s, PRIOR_TOKEN_S)
    return rates


def test_the_model_fits_a_line_through_the_steps():
    rates = taught((n, 0.005 + 0.0001 * n) for n in [1, 2048, 3, 700, 64] * 20)
    assert rates.step_s == pytest.approx(0.005, rel=0.05)
    assert rates.token_s == pytest.approx(0.0001, rel=0.01)


@pytest.mark.parametrize(
    "steps",
    [[(8, 0.05)] * 100, [(2048, 0.0001), (1, 1.0)] * 50, [(1, 1e-9)] * 10, [(100_000, 0.1), (1, 0.2)]],
    ids=["all alike", "falling", "no time at all", "two"],
)
def test_times_are_never_negative(steps):
    rates = taught(steps)
    assert rates.token_s > 0
    assert rates.step_s >= 0


def test_prefill_never_looks_free():
    rates = taught([(1, 0.9), (160, 0.7), (1, 0.8)])  # on a machine with other work
    assert 2048 * rates.token_s >= 0.99 * rates.step_s > 0.3


def test_an_own_slope_needs_steps_of_several_sizes():
    assert not taught([(1, 0.05)] * 50).is_own
    assert taught([(1, 0.05), (160, 0.7)]).is_own


def test_one_long_step_barely_changes_the_model():
    usual = [(n, 0.005 + 0.0001 * n) for n in [1, 512] * 30]
    rates = taught([*usual, (4, 60.0), *usual[:10]])
    assert rates.token_s == pytest.approx(0.0001, rel=0.2)
    assert rates.step_s < 0.01


def test_prompts_after_a_short_step_are_no_outliers():
    """The stream of a replica with few requests so far reports one step of one token first."""
    rates = taught([(1, 0.05), (466, 4.3), (1, 0.5), (66, 1.0), (66, 0.9)])
    assert rates.token_s == pytest.approx(0.0085, rel=0.1)


def test_a_lasting_change_is_learned():
    rates = taught([(n, 0.0001 * n) for n in [64, 512] * 50] + [(n, 0.001 * n) for n in [64, 512] * 100])
    assert rates.token_s == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize("own", [1.0, 1.4, 1.6, 0.7, 0.6])
def test_similar_replicas_count_as_equally_fast(own):
    rates = taught((n, own * 0.001 * n) for n in [64, 512] * 50)
    assert rates.likely_token_s(0.001) == 0.001


@pytest.mark.parametrize(("own", "low", "high"), [(3, 1.7, 2), (1 / 3, 0.5, 0.6), (100, 4, 4), (0.001, 0.25, 0.25)])
def test_clearly_different_replicas_differ_in_speed(own, low, high):
    rates = taught((n, own * 0.001 * n) for n in [64, 512] * 50)
    assert low <= rates.likely_token_s(0.001) / 0.001 <= high


@pytest.mark.parametrize(
    "steps",
    [
        [(64, 0.128), (512, 1.024)],
        [(64, 0.03), (512, 1.6), (40, 0.25), (400, 0.5), (64, 0.3), (500, 1.3)],
    ],
    ids=["two", "a few that scatter"],
)
def test_an_uncertain_difference_in_speed_is_ignored(steps):
    rates = taught(steps)
    assert rates.is_own
    assert rates.token_s > 0.0017
    assert rates.likely_token_s(0.001) == 0.001


def test_a_replica_with_few_steps_has_the_shared_rate():
    assert taught([(1, 0.05)] * 50).likely_token_s(0.001) == 0.001
