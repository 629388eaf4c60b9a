"""The laws of the scheduler (`SchedulerMachine`) in 2 000 examples without, with one and with two steps ahead."""

import pytest
from hypothesis import settings
from octavo_testing.scheduler_machine import SchedulerMachine

pytestmark = pytest.mark.slow

MANY = settings(max_examples=2000 // 3 + 1, stateful_step_count=50)


class WithoutSteps(SchedulerMachine):
    steps_ahead = 0


class OneStep(SchedulerMachine):
    steps_ahead = 1


class TwoSteps(SchedulerMachine):
    steps_ahead = 2


TestWithoutSteps, TestOneStep, TestTwoSteps = WithoutSteps.TestCase, OneStep.TestCase, TwoSteps.TestCase
TestWithoutSteps.settings = TestOneStep.settings = TestTwoSteps.settings = MANY
