"""Tokens cost no more with all fields at their limits: each pair of fields against a plain request."""

import json
import os
import subprocess
import sys

import pytest
from octavo_testing.core_process import SUPPORT
from octavo_testing.costly_fields import combined_bodies
from octavo_testing.token_costs import MAX_RATIO

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def costs():
    env = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-m", "octavo_testing.token_costs"]
    return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=580).stdout)


@pytest.mark.parametrize("name", combined_bodies())
def test_fields_at_their_limits_do_not_multiply_the_cost_of_a_token(costs, name):
    cost_s, plain_s = costs[name]
    assert cost_s <= MAX_RATIO * plain_s
