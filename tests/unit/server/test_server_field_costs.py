"""The fast twin of `tests/hostile/test_hostile_token_costs.py`."""

import pytest
from octavo_engine.text.stop_strings import StopSearch, StopStrings
from octavo_server.config import RequestLimits
from octavo_server.openai.limits import check_counts
from octavo_testing.costly_fields import CHEAP, COMPLETION, COSTLY, LETTER, combined_bodies, sized_fields
from octavo_testing.counted_work import count_steps


def test_each_sized_field_is_measured_or_named_with_a_reason() -> None:
    measured = {name for values in COSTLY.values() for name in values}
    assert measured.isdisjoint(CHEAP)
    assert measured | set(CHEAP) == sized_fields()


@pytest.mark.parametrize("name", combined_bodies())
def test_the_measured_bodies_are_within_the_limits(name: str) -> None:
    _, body = combined_bodies()[name]
    check_counts({"prompt": LETTER, **body}, RequestLimits())


def test_stop_strings_at_their_limits_cost_few_steps_for_a_letter() -> None:
    search = StopSearch(StopStrings(COSTLY[COMPLETION]["stop"]))
    for _ in range(1000):
        search.push(LETTER)
    with count_steps() as steps:
        search.push(LETTER)
    assert steps.count < 60
