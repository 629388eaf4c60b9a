"""The server's periodic tasks fail at times, as when no file descriptor is left: it serves on, and they run again."""

import asyncio
import errno

from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

NUM_FAILURES = 2


class FailingClient(ScriptedClient):
    """Its CPU time can't be read at first."""

    num_reads = 0

    def core_cpu_s(self):
        self.num_reads += 1
        if self.num_reads <= NUM_FAILURES:
            raise OSError(errno.EMFILE, "Too many open files")
        return 1.0


async def test_a_failing_update_of_the_health_does_not_end_the_server(tmp_path, caplog):
    engine = FailingClient(write_byte_model(tmp_path))
    async with serving(engine) as served, asyncio.timeout(60):
        while engine.num_reads <= NUM_FAILURES:
            assert (await served.http.get("/health")).status_code == 200
        assert not served.server.should_exit
    assert sum("updating the health failed" in record.message for record in caplog.records) == NUM_FAILURES
