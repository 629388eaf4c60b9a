"""One tiny server for all malformed requests."""

from collections.abc import Iterator

import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.serve_command import octavo_serve
from octavo_testing.target import Target, target

NUM_BLOCKS = 64
FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny"),
    *("--max-model-len", "64", "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-seqs", "16"),
    *("--debug-invariants", "--uvicorn-log-level", "error"),
)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "model").mkdir()
    model = str(write_byte_model(folder / "model"))
    with octavo_serve(folder, model, *FLAGS) as process, target(process) as served:
        yield served


@pytest.fixture
def num_blocks() -> int:
    return NUM_BLOCKS
