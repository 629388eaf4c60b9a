"""Positions of the tokens of prompts with images, as Qwen-VL counts them, against transformers'."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.sampling.seq_state import grid_positions
from octavo_engine.wire.records import ImageSpan
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

MERGE = 2
IMAGES = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40))  # tokens before it, rows, columns


def their_positions(model: Any, types: list[int], grids: list[list[int]]) -> torch.Tensor:
    bare = object.__new__(model)
    vars(bare).update(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    ids = torch.tensor([types])
    positions: torch.Tensor = bare.get_rope_index(ids, ids, image_grid_thw=torch.tensor(grids))[0]
    return positions[:, 0]


@given(st.lists(IMAGES, min_size=1, max_size=3), st.integers(0, 4), st.sampled_from([Qwen2VLModel, Qwen3VLModel]))
def test_positions_equal_those_of_transformers(images: list[tuple[int, int, int]], after: int, model: Any) -> None:
    types, spans = list[int](), list[ImageSpan]()
    for before, rows, columns in images:
        types += [0] * before
        spans.append(ImageSpan(start=len(types), length=rows * columns, digest=b"", grid=(rows, columns)))
        types += [1] * rows * columns
    types += [0] * after
    wanted = their_positions(model, types, [[1, MERGE * rows, MERGE * columns] for _, rows, columns in images])
    positions, offset = grid_positions(spans)
    assert positions is not None
    assert positions.tolist() == wanted[:, : spans[-1].end].tolist()
    assert [place + offset for place in range(spans[-1].end, len(types))] == wanted[0, spans[-1].end :].tolist()


def test_images_side_by_side_follow_each_other() -> None:
    positions, offset = grid_positions(
        [ImageSpan(start=start, length=4, digest=b"", grid=(2, 2)) for start in (0, 4, 8)]
    )
    assert positions is not None
    assert positions[0].tolist() == [0] * 4 + [2] * 4 + [4] * 4
    assert all(after - before >= 0 for before, after in pairwise(positions[0].tolist()))
    assert offset == 6 - 12


def test_images_without_a_grid_have_the_positions_of_texts() -> None:
    assert grid_positions([ImageSpan(start=3, length=9, digest=b"")]) == (None, 0)
    assert grid_positions([]) == (None, 0)
