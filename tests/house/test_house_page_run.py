"""A command of a page that ends while it should run in the background fails the page."""

import os
from pathlib import Path

import pytest
from octavo_testing.page_run import PageRun


@pytest.mark.parametrize("command", ["exit 1 || octavo serve", "test -d --follow", "true --follow"])
def test_a_background_command_that_ends_fails_the_page(command: str, tmp_path: Path) -> None:
    run = PageRun(tmp_path, os.environ)
    run.run_command(command)
    (background,) = run._background
    background.process.wait()
    with pytest.raises(AssertionError, match="ended"):
        run.wait_until_ready()


def test_a_command_that_follows_without_a_port_keeps_running(tmp_path: Path) -> None:
    with PageRun(tmp_path, os.environ) as run:
        run.run_command("tail --follow /dev/null")
        run.wait_until_ready()
