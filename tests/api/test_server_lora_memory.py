"""More adapters than fit into the memory, on a slow disk: requests for the model itself never wait."""

import asyncio
import os
from pathlib import Path

import pytest
from octavo_engine import AsyncLLM
from octavo_engine.settings.engine_args import resolve_config
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.server import MODEL, Served, serving
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow
NUM_ADAPTERS, NUM_CLIENTS, LIMIT_S = 20, 40, 240


class SlowDisk:
    """The folders of adapters, whose reads hang between `hold` and `deliver`."""

    def __init__(self, folder: Path) -> None:
        self.folders = [write_adapter(folder / f"a{i}", llama_pairs(seed=i)) for i in range(NUM_ADAPTERS)]
        self._files = [each / "adapter_config.json" for each in self.folders]
        self._content = self._files[0].read_bytes()

    def hold(self) -> None:
        for file in self._files:
            file.unlink()
            os.mkfifo(file)

    def deliver(self) -> None:
        """Let the reads in progress, and all later ones, get their bytes."""
        for file in self._files:
            fifo = file.rename(file.with_suffix(".fifo"))
            file.write_bytes(self._content)
            fd = os.open(fifo, os.O_RDWR)  # a read that hangs has opened its end now
            os.write(fd, self._content)
            os.close(fd)


async def completion(served: Served, model: str) -> str:
    body = {"model": model, "prompt": "hello world", "max_tokens": 4, "temperature": 0}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_requests_for_the_model_never_wait_for_adapters(tmp_path, num_ranks):
    disk = SlowDisk(tmp_path / "adapters")
    config = resolve_config(
        model=str(make_tiny("llama", tmp_path)),
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        num_gpu_blocks_override=600,
        num_threads=num_ranks,
        tensor_parallel_size=num_ranks,
    )
    engine = await AsyncLLM.start(config)
    try:
        async with serving(engine, allows_adapter_updates=True) as served, asyncio.timeout(LIMIT_S):
            for index, folder in enumerate(disk.folders):
                body = {"lora_name": f"a{index}", "lora_path": str(folder)}
                assert (await served.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
            base = await completion(served, MODEL)
            expected = [await completion(served, f"a{index}") for index in range(NUM_ADAPTERS)]
            assert len({*expected, base}) > NUM_ADAPTERS / 2
            disk.hold()
            clients = [
                asyncio.create_task(completion(served, f"a{index % NUM_ADAPTERS}")) for index in range(NUM_CLIENTS)
            ]
            while engine.stats.deferred < NUM_CLIENTS - NUM_CLIENTS // NUM_ADAPTERS * config.max_loras:
                assert await completion(served, MODEL) == base
            for _ in range(NUM_CLIENTS):
                assert await completion(served, MODEL) == base
            assert sum(not client.done() for client in clients) >= engine.stats.deferred > 0
            disk.deliver()
            assert await asyncio.gather(*clients) == [expected[index % NUM_ADAPTERS] for index in range(NUM_CLIENTS)]
    finally:
        await engine.shutdown()
