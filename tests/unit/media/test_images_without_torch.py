"""An image is processed in a process without torch, as processes that only read images have none."""

import subprocess
import sys
from pathlib import Path

import pytest
from octavo_testing.pictures import RED, encoded, quarter
from octavo_testing.vision_checkpoints import VISION, write_vision_files

pytestmark = pytest.mark.slow


def test_an_image_is_processed_without_torch(tmp_path: Path) -> None:
    folder = write_vision_files(tmp_path, VISION["smolvlm"])
    (tmp_path / "image.png").write_bytes(encoded(quarter(RED), "PNG"))
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from octavo_engine.media.processor import load_processor
from octavo_engine.sources.model_files import ModelFiles
files = ModelFiles(name="tiny", root=Path({str(folder)!r}), load_format="safetensors", config={{}})
print(load_processor(files).process(Path({str(tmp_path / "image.png")!r}).read_bytes())["pixel_values"].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(1, 13, 3, 32, 32)\n", done.stderr
