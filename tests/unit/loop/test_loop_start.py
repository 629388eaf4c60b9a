"""Warnings about flags that contradict each other, before the engine core is created."""

import pytest
from octavo_engine.loop.start import start_core
from octavo_engine.settings.config import EngineConfig
from octavo_testing.scripted import load


@pytest.mark.parametrize(("tokens", "seqs", "lines"), [(255, 256, 1), (256, 256, 0), (2048, 256, 0)])
def test_a_step_smaller_than_the_number_of_sequences_is_announced(tokens, seqs, lines, caplog):
    core, _ = start_core(EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs), load)
    core.shutdown()
    found = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == lines
    assert all(f"{tokens}" in line and f"{seqs}" in line for line in found)
