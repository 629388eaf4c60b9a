"""Numbers and texts of image tokens equal the arrays and texts that transformers' processors make."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from octavo_engine.media.placeholders import (
    MAX_PIXELS,
    MAX_RATIO,
    ImageTokens,
    PatchGrid,
    make_image_tokens,
    most_tokens,
)
from octavo_engine.media.processor_settings import REPLACEABLE, check_kwargs
from octavo_engine.wire.errors import InvalidRequest, StartupError
from octavo_testing.vision_checkpoints import IMAGE, VISION, VisionFiles, sizes, write_vision_files
from transformers import (
    AutoImageProcessor,
    Idefics3Processor,
    LlavaProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    SmolVLMProcessor,
)
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.smolvlm.image_processing_pil_smolvlm import get_resize_output_image_size

NUM_SIZES = 200
#: The module of Pixtral's processor imports torchvision only for a function that is also in this one.
with patch.dict(sys.modules, {"transformers.models.pixtral.image_processing_pixtral": image_processing_pil_pixtral}):
    PixtralProcessor = import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
#: By the type of the tower, else by the family.
PROCESSORS = {
    "idefics3": Idefics3Processor,
    "internvl": InternVLProcessor,
    "llava": LlavaProcessor,
    "pixtral": PixtralProcessor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen2_vl": Qwen2VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "smolvlm": SmolVLMProcessor,
}


#: What a family's processor passes to its image processor when it is called.
OPTIONS = {
    "idefics3": {"return_row_col_info": True},
    "internvl": InternVLProcessor.images_kwargs,
    "smolvlm": {"return_row_col_info": True},
}


@pytest.fixture(scope="module", params=list(VISION))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Reference":
    return Reference(VISION[request.param], tmp_path_factory.mktemp(request.param))


class Reference:
    """transformers' image processor, and its processor made without the constructor, which needs more packages."""

    def __init__(self, files: VisionFiles, folder: Path) -> None:
        write_vision_files(folder, files)
        self.files = files
        self.rule = make_image_tokens(files.family, files.hf, files.image, IMAGE)
        self.images = AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
        tower = files.hf["vision_config"]
        self.tower = tower.get("model_type", files.family)
        family = PROCESSORS.get(self.tower) or PROCESSORS[files.family]
        self.processor: Any = family.__new__(family)
        side, patch = (int(np.ravel(tower.get(name, 0))[0]) for name in ("image_size", "patch_size"))
        merged = files.hf.get("scale_factor", 2 if self.tower == "internvl" else 1)
        count = (side // patch) ** 2 // merged**2
        vars(self.processor).update(
            image_token=IMAGE,
            image_processor=self.images,
            fake_image_token="<fake_token_around_image>",
            global_image_token="<global-img>",
            global_image_tag="<global-img>",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
            start_image_token="<img>",
            end_image_token="</img>",
            image_seq_len=count,
            image_seq_length=count,
            spatial_merge_size=files.hf.get("spatial_merge_size", 1),
            patch_size=patch,
            num_additional_image_tokens=1,
            vision_feature_select_strategy=files.hf.get("vision_feature_select_strategy", "default"),
        )

    def outputs(self, width: int, height: int) -> dict[str, Any]:
        pixels = np.zeros((height, width, 3), np.uint8)
        outputs: dict[str, Any] = self.processor._process_images(
            pixels,
            do_rescale=False,
            do_normalize=False,
            input_data_format="channels_last",
            return_tensors="np",
            **OPTIONS.get(self.files.family, {}),
        )[0]
        return outputs

    def num_rows(self, outputs: dict[str, Any]) -> int:
        """Rows that the tower makes of the arrays: one for each patch, or for each group of merged patches."""
        shape = outputs["pixel_values"].shape
        if "image_grid_thw" in outputs:
            return int(shape[0]) // self.images.merge_size**2
        patch = self.processor.patch_size
        if self.tower == "pixtral":
            return int(np.prod(outputs["image_sizes"][0] // (patch * self.processor.spatial_merge_size)))
        if self.files.family == "llava":
            is_full = self.processor.vision_feature_select_strategy == "full"
            return shape[2] // patch * (shape[3] // patch) + is_full
        return int(shape[0 if self.tower == "internvl" else 1]) * self.processor.image_seq_len


def differing_sizes(reference: Reference, rule: ImageTokens) -> list[tuple[int, int]]:
    found = []
    for width, height in sizes(NUM_SIZES):
        outputs = reference.outputs(width, height)
        text = reference.processor.replace_image_token(outputs, image_idx=0)
        own = rule.text(width, height)
        is_equal = own == text and own.count(IMAGE) == rule.num_tokens(width, height) == reference.num_rows(outputs)
        found += [] if is_equal else [(width, height)]
    return found


def test_text_and_number_equal_those_of_transformers(reference: Reference) -> None:
    assert differing_sizes(reference, reference.rule) == []


class OneTokenMore:
    def __init__(self, rule: ImageTokens) -> None:
        self.scaled_size, self._rule = rule.scaled_size, rule

    def num_tokens(self, width: int, height: int) -> int:
        return self._rule.num_tokens(width, height) + 1

    def text(self, width: int, height: int) -> str:
        return self._rule.text(width, height) + IMAGE


def test_a_rule_with_one_token_more_differs_at_each_size(reference: Reference) -> None:
    assert len(differing_sizes(reference, OneTokenMore(reference.rule))) == NUM_SIZES


@pytest.mark.parametrize("name", VISION)
def test_no_image_has_more_tokens_than_the_largest(name: str) -> None:
    files = VISION[name]
    rule = make_image_tokens(files.family, files.hf, files.image, IMAGE)
    edges = [*range(8, 200, 9), 333, 1000, 1001, 1600, 4000]
    shapes = [(w, h) for w in edges for h in edges if max(w, h) <= MAX_RATIO * min(w, h)]
    found = max(rule.num_tokens(*shape) for shape in shapes)
    assert found <= most_tokens(rule) <= 1.03 * found


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_grid_of_a_scaled_image_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    reference = Reference(VISION[name], tmp_path)
    rule, merge = reference.rule, reference.images.merge_size
    assert isinstance(rule, PatchGrid)
    for width, height in sizes(NUM_SIZES):
        _, rows, columns = reference.outputs(width, height)["image_grid_thw"][0].tolist()
        assert rule.grid(width, height) == (rows // merge, columns // merge)


@given(
    st.integers(1, 70_000), st.integers(1, 70_000), st.sampled_from([28, 32, 9]), st.integers(1, 10**8), st.integers(1)
)
def test_images_are_scaled_as_by_transformers_at_all_sizes(
    width: int, height: int, factor: int, min_pixels: int, more: int
) -> None:
    assume(max(width, height) <= MAX_RATIO * min(width, height))
    max_pixels = min_pixels + more
    rule = PatchGrid(token=IMAGE, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    wanted = smart_resize(height, width, factor, min_pixels, max_pixels)
    assert rule.scaled_size(width, height)[::-1] == wanted


@pytest.mark.parametrize("longest", [128, 5000])
def test_an_image_is_scaled_as_by_transformers(longest: int) -> None:
    files = VISION["smolvlm"]
    settings = {**files.image, "size": {"longest_edge": longest}, "do_image_splitting": False}
    rule = make_image_tokens(files.family, files.hf, settings, IMAGE)
    for width, height in sizes(NUM_SIZES):
        pixels = np.broadcast_to(np.uint8(0), (3, height, width))
        assert rule.scaled_size(width, height)[::-1] == get_resize_output_image_size(pixels, longest)


@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        *(("smolvlm", (128, 32)), ("llava", (28 * 65_000, 28)), ("llava_full", (65_000, 65_000))),
        *(("pixtral", (256, 0)), ("mistral3", (256, 0)), ("internvl", (12 * 28, 28))),
    ],
)
def test_the_scaled_size_shows_what_a_narrow_image_becomes(name: str, scaled: tuple[int, int]) -> None:
    files = VISION[name]
    assert make_image_tokens(files.family, files.hf, files.image, IMAGE).scaled_size(65_000, 1) == scaled


LLAVA, SMOLVLM, QWEN = VISION["llava"], VISION["smolvlm"], VISION["qwen2_vl"]
PIXTRAL, MISTRAL3, INTERNVL = VISION["pixtral"], VISION["mistral3"], VISION["internvl"]
REFUSED = {
    "another family": ("pixtral", LLAVA.hf, LLAVA.image, "'pixtral'"),
    "another tower": ("llava", {"vision_config": {"model_type": "siglip_vision_model"}}, LLAVA.image, "siglip"),
    "another processor": ("llava", LLAVA.hf, {"image_processor_type": "SiglipImageProcessor"}, "Siglip"),
    "no cut": ("llava", LLAVA.hf, {**LLAVA.image, "do_center_crop": False}, "crop_size"),
    "a cut of another size": ("llava", LLAVA.hf, {**LLAVA.image, "crop_size": 30}, "28 x 28"),
    "tiles of another size": ("smolvlm", SMOLVLM.hf, {**SMOLVLM.image, "max_image_size": {"longest_edge": 64}}, "32"),
    "no scaling": ("smolvlm", SMOLVLM.hf, {**SMOLVLM.image, "do_resize": False}, "do_resize"),
    "a fixed size": ("smolvlm", SMOLVLM.hf, {**SMOLVLM.image, "size": {"height": 9, "width": 9}}, "longest_edge"),
    "a text for a number": ("smolvlm", {**SMOLVLM.hf, "scale_factor": "2"}, SMOLVLM.image, "wrong types"),
    "patches of another size": ("qwen2_vl", QWEN.hf, {**QWEN.image, "patch_size": 14}, "patch_size and merge_size"),
    "groups of another size": ("qwen2_vl", QWEN.hf, {**QWEN.image, "merge_size": 3}, r"\(4, 2\) of vision_config"),
    "patches of no scaling": ("qwen3_vl", QWEN.hf, {**QWEN.image, "do_resize": False}, "do_resize"),
    "no smallest size": ("qwen3_vl", QWEN.hf, {**VISION["qwen3_vl"].image, "size": {"longest_edge": 9}}, "shortest"),
    "another processor of Pixtral": ("mistral3", MISTRAL3.hf, LLAVA.image, "CLIP"),
    "Pixtral without a processor's name": ("llava", PIXTRAL.hf, {"size": {"longest_edge": 64}}, "Llava"),
    "Pixtral without its first patch": ("llava", {"vision_config": {"model_type": "pixtral"}}, PIXTRAL.image, "full"),
    "a fixed size of Pixtral": ("mistral3", MISTRAL3.hf, {"size": {"height": 9, "width": 9}}, "longest_edge"),
    "Pixtral without scaling": ("mistral3", MISTRAL3.hf, {**MISTRAL3.image, "do_resize": False}, "do_resize"),
    "no edge of Pixtral": ("mistral3", MISTRAL3.hf, {**MISTRAL3.image, "size": {"longest_edge": 0}}, "wrong types"),
    "another processor of InternVL": ("internvl", INTERNVL.hf, MISTRAL3.image, "GotOcr2"),
    "tiles of InternVL of another size": ("internvl", INTERNVL.hf, {**INTERNVL.image, "size": 56}, "28 x 28"),
    "tiles of three edges": ("internvl", {"vision_config": {"image_size": [28] * 3}}, INTERNVL.image, "wrong types"),
    "oblong tiles": ("internvl", {"vision_config": {"image_size": [28, 56]}}, INTERNVL.image, "28 x 28"),
    "the first patch of InternVL": (
        "internvl",
        INTERNVL.hf | {"vision_feature_select_strategy": "full"},
        INTERNVL.image,
        "default",
    ),
    "no tiles": ("internvl", INTERNVL.hf, {**INTERNVL.image, "max_patches": 0}, "max_patches"),
    "endless tiles": ("internvl", INTERNVL.hf, {**INTERNVL.image, "max_patches": 10**9}, "max_patches"),
    "no patches": ("llava", {"vision_config": {**LLAVA.hf["vision_config"], "patch_size": 0}}, LLAVA.image, "types"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_without_a_rule_are_refused(case: str) -> None:
    family, hf, image, says = REFUSED[case]
    with pytest.raises(StartupError, match=says):
        make_image_tokens(family, hf, image, IMAGE)


CLIP, PIXTRAL_TOWER = {"model_type": "clip_vision_model"}, {"model_type": "pixtral"}
SIZES_OF_TILES = {"vision_config": {"image_size": 364, "patch_size": 14}}
#: By name: a config with the keys that have no defaults, and the keys that it omits, with transformers' defaults.
OMITTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smolvlm": (SIZES_OF_TILES, {"scale_factor": 2}),
    "idefics3": (SIZES_OF_TILES, {"scale_factor": 2}),
    "llava": ({"vision_config": CLIP}, {"vision_config": {**CLIP, "image_size": 224, "patch_size": 32}}),
    "pixtral": (
        {"vision_config": PIXTRAL_TOWER, "vision_feature_select_strategy": "full"},
        {"vision_config": {**PIXTRAL_TOWER, "image_size": 1024, "patch_size": 16}},
    ),
    "mistral3": (
        {"vision_config": {}},
        {"vision_config": {**PIXTRAL_TOWER, "image_size": 1024, "patch_size": 16}, "spatial_merge_size": 2},
    ),
    "internvl": (
        {"vision_config": {"image_size": [384, 384], "patch_size": [16, 16]}},  # 448 by default, but 384 of the file
        {},
    ),
    "qwen2_vl": ({"vision_config": {}}, {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}),
    "qwen3_vl": ({"vision_config": {"patch_size": 14}}, {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}),
}


@pytest.mark.parametrize("name", OMITTED)
def test_keys_that_a_file_omits_have_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    """An empty file of settings gives as many tokens as transformers' processor with its defaults."""
    given, omitted = OMITTED[name]
    image = {"image_processor_type": VISION[name].image["image_processor_type"]}
    whole = VisionFiles(family=VISION[name].family, hf=given | omitted, image=image, template="")
    reference, rule = Reference(whole, tmp_path), make_image_tokens(whole.family, given, image, IMAGE)
    for width, height in [(1, 1), (700, 300), (30, 900)]:
        text = reference.processor.replace_image_token(reference.outputs(width, height), image_idx=0)
        assert rule.text(width, height) == text


SIZES = [(family, name) for family, settings in REPLACEABLE.items() for name in settings.names if name[:3] != "do_"]


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_a_request_cannot_ask_for_a_text_that_fills_the_memory(family: str, name: str) -> None:
    """A text of image tokens is made to check the settings, before those of the server limit them."""
    for size in (MAX_PIXELS, MAX_PIXELS + 1, 10**12, 10**4000):
        kwargs = {name: {"longest_edge": size} if name == "size" else size}
        if size == MAX_PIXELS:
            check_kwargs(kwargs, family)
            continue
        with pytest.raises(InvalidRequest, match=rf"{name} must be .* from 1 to {MAX_PIXELS}, got "):
            check_kwargs(kwargs, family)
