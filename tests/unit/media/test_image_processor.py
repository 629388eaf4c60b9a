"""`ImageProcessor` gives the bytes of the pixels that transformers' image processors normalise."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from octavo_engine.media.picture import decode
from octavo_engine.media.placeholders import PatchGrid, PatchRows, make_image_tokens, processor_options
from octavo_engine.media.processor import load_processor
from octavo_engine.media.processor_settings import read_processor_settings
from octavo_engine.sources.file_selection import select_files
from octavo_engine.wire.errors import InvalidRequest, StartupError
from octavo_testing.pictures import RED, encoded, quarter
from octavo_testing.vision_checkpoints import IMAGE, VISION, model_files, write_vision_files
from PIL import Image
from transformers import AutoImageProcessor

NAMES = list(VISION)
SIZES = [(1, 1), (3, 50), (50, 3), (40, 30), (200, 1)]


def num_rows(pixels: np.ndarray, rule: Any) -> int:
    tiles = pixels[0] if pixels.ndim == 5 else pixels
    return int(tiles[0, 0].size // rule.patch**2 if isinstance(rule, PatchRows) else len(tiles) * rule.count)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nested", [False, True])
def test_pixels_are_bytes_that_normalise_to_those_of_transformers(name: str, nested: bool, tmp_path: Path) -> None:
    folder = write_vision_files(tmp_path, VISION[name], nested=nested)
    processor = load_processor(model_files(folder, VISION[name]))
    assert processor is not None
    options = processor_options(VISION[name].family, VISION[name].hf)
    reference = AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
    rule = make_image_tokens(VISION[name].family, VISION[name].hf, VISION[name].image, IMAGE)
    for width, height in SIZES:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3)).astype(np.uint8)
        arrays = processor.process(encoded(Image.fromarray(pixels), "PNG"))
        given = {"input_data_format": "channels_last", "return_tensors": "np", **options}
        wanted = reference.preprocess(pixels, **given)["pixel_values"]
        assert set(arrays) - {"image_grid_thw"} == {
            "pixel_values",
            *(("image_sizes",) if "patch_size" in options else ()),
        }
        assert arrays["pixel_values"].dtype == np.uint8
        wanted = wanted if wanted.ndim > 2 else wanted.reshape(arrays["pixel_values"].shape)
        shape = (3, 1, 1)
        mean, std = (np.reshape(each, shape) for each in (processor.mean, processor.std))
        assert abs((arrays["pixel_values"] * processor.rescale_factor - mean) / std - wanted).max() < 1e-6
        tokens = rule.text(width, height).count(IMAGE)
        if isinstance(rule, PatchGrid):
            assert tokens == arrays["image_grid_thw"].prod() / VISION[name].image["merge_size"] ** 2
            continue
        assert tokens == num_rows(wanted, rule)


def test_settings_that_switch_normalising_off_are_followed(tmp_path: Path) -> None:
    files = VISION["llava"]
    plain = replace(files, image={**files.image, "do_rescale": False, "do_normalize": False})
    processor = load_processor(model_files(write_vision_files(tmp_path, plain)))
    assert (processor.rescale_factor, processor.mean, processor.std) == (1.0, (0.0,) * 3, (1.0,) * 3)


def test_a_digest_names_settings_and_file(tmp_path: Path) -> None:
    first = model_files(write_vision_files(tmp_path / "a", VISION["smolvlm"]))
    same = model_files(write_vision_files(tmp_path / "b", VISION["smolvlm"], nested=True))
    other = model_files(write_vision_files(tmp_path / "c", VISION["idefics3"]))
    data = encoded(quarter(RED), "PNG")
    assert read_processor_settings(first).digest(data) == read_processor_settings(same).digest(data)
    digests = {read_processor_settings(files).digest(each) for files in (first, other) for each in (data, data + b"x")}
    assert {len(digest) for digest in digests} == {32}
    assert len(digests) == 4


KWARGS: dict[str, list[dict[str, Any]]] = {
    "smolvlm": [
        {"do_image_splitting": False},
        {"size": {"longest_edge": 64}},
        {"size": {"longest_edge": 1}},
        {"do_image_splitting": False, "size": {"longest_edge": 40}},
    ],
    "smolvlm_whole": [{"size": {"longest_edge": 33}}],
    "idefics3": [{"do_image_splitting": False}, {"size": {"longest_edge": 30}}],
    "llava": [{"size": {"shortest_edge": 20}}],
    "llava_full": [{"size": {"shortest_edge": 35}}],
    "pixtral": [{"size": {"longest_edge": 30}}],
    "mistral3": [{"size": {"longest_edge": 30}}],
    "internvl": [{"max_patches": 1}, {"max_patches": 4}],
    "qwen2_vl": [{"max_pixels": 1500}, {"min_pixels": 100, "max_pixels": 900}],
    "qwen2_5_vl": [{"max_pixels": 900}],
    "qwen3_vl": [{"max_pixels": 1500}, {"min_pixels": 100}],
}


@pytest.mark.parametrize(("name", "kwargs"), [(name, each) for name, cases in KWARGS.items() for each in cases])
def test_settings_that_replace_others_give_the_arrays_of_transformers(
    name: str, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    """Settings are replaced at the start, or for one image."""
    files = model_files(write_vision_files(tmp_path, VISION[name]), VISION[name])
    options = processor_options(VISION[name].family, VISION[name].hf)
    started, each = load_processor(files, kwargs), load_processor(files)
    auto = AutoImageProcessor.from_pretrained(
        str(files.root), backend="pil", local_files_only=True, **copy.deepcopy(kwargs)
    )
    settings = read_processor_settings(files, kwargs)
    rule = make_image_tokens(VISION[name].family, VISION[name].hf, settings.image, IMAGE)
    for width, height in SIZES:
        if rule.num_tokens(width, height) == 0:  # Pixtral leaves nothing of a narrow image
            continue
        data = encoded(quarter(RED, size=(width, height)), "PNG")
        arrays = started.process(data), each.process(data, kwargs=json.dumps(kwargs))
        wanted = auto.preprocess(
            decode(data, "image"), input_data_format="channels_last", return_tensors="np", do_rescale=False,
            do_normalize=False, **options,
        )["pixel_values"]  # fmt: skip
        pixels = arrays[0]["pixel_values"]
        assert (pixels == arrays[1]["pixel_values"]).all()
        assert (pixels == wanted.reshape(pixels.shape)).all()
        if isinstance(rule, PatchGrid):
            num_tokens = arrays[0]["image_grid_thw"].prod() / VISION[name].image["merge_size"] ** 2
        else:
            num_tokens = num_rows(wanted, rule)
        assert rule.num_tokens(width, height) == num_tokens
        assert settings.digest(data) != read_processor_settings(files).digest(data)


def test_the_order_of_settings_changes_no_digest(tmp_path: Path) -> None:
    settings = read_processor_settings(model_files(write_vision_files(tmp_path, VISION["smolvlm"])))
    one = settings.replaced({"do_image_splitting": False, "size": {"longest_edge": 64}})
    other = settings.replaced({"size": {"longest_edge": 64}, "do_image_splitting": False})
    assert one.digest(b"x") == other.digest(b"x")


def test_the_limit_of_pixels_holds_while_images_are_decoded(tmp_path: Path) -> None:
    files = model_files(write_vision_files(tmp_path, VISION["llava"]))
    data = encoded(quarter(RED, size=(40, 30)), "PNG")
    assert load_processor(files, max_pixels=1200).process(data)
    with pytest.raises(InvalidRequest, match=r"40 x 30 pixels; the limit is 1199 pixels .*--max-image-pixels"):
        load_processor(files, max_pixels=1199).process(data)


def test_a_damaged_image_names_its_place(tmp_path: Path) -> None:
    processor = load_processor(model_files(write_vision_files(tmp_path, VISION["llava"])))
    with pytest.raises(InvalidRequest, match=r"^image 2 of the prompt cannot be decoded"):
        processor.process(encoded(quarter(RED), "PNG")[:60], "image 2 of the prompt")


def test_files_of_an_unknown_processor_end_the_start(tmp_path: Path) -> None:
    folder = write_vision_files(tmp_path, replace(VISION["llava"], image={"image_processor_type": "UnknownProcessor"}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StartupError, match="cannot make its image processor"):
        load_processor(model_files(folder))


def test_files_without_a_processor_have_none(tmp_path: Path) -> None:
    """The legacy processor_config.json of SmolVLM has only the name of the processor."""
    (tmp_path / "processor_config.json").write_text('{"processor_class": "SmolVLMProcessor"}')
    assert load_processor(model_files(tmp_path)) is None


def test_settings_that_are_no_object_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"image_processor": ["SmolVLMImageProcessor"]}')
    with pytest.raises(StartupError, match=r"image_processor in processor_config\.json"):
        read_processor_settings(model_files(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ending", ["", "Fast"])
@pytest.mark.parametrize("name", NAMES)
def test_processors_have_their_old_and_their_fast_names(name: str, ending: str, nested: bool, tmp_path: Path) -> None:
    files = VISION[name]
    image = {**files.image, "image_processor_type": files.image["image_processor_type"].removesuffix("Fast") + ending}
    found = load_processor(model_files(write_vision_files(tmp_path, replace(files, image=image), nested=nested), files))
    assert found is not None
    rule = make_image_tokens(files.family, files.hf, image, IMAGE)
    assert rule.num_tokens(9, 9) > 0
    assert found.process(encoded(quarter(RED), "PNG"))["pixel_values"].dtype == np.uint8


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_settings_are_downloaded_with_a_model(load_format: str) -> None:
    wanted = {"preprocessor_config.json", "processor_config.json"}
    names = ["config.json", "model.safetensors", *wanted]
    assert wanted <= set(select_files("hf://a/b", names, load_format=load_format).names)
