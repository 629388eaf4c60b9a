"""The laws of the scheduler (`SchedulerMachine`)."""

from hypothesis import settings
from octavo_testing.scheduler_machine import SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=50)
