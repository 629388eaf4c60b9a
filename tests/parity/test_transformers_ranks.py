"""Models that transformers runs, divided among ranks: a norm over all heads, and the proof of what a rank computes."""

from pathlib import Path

import pytest
from octavo_engine.layers.norm import RankNorm, RMSNorm
from octavo_engine.models import transformers_ranks
from octavo_engine.models.registry import check_ranks
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.parity import expected_logits
from octavo_testing.tiny_models import make_tiny
from octavo_testing.transformers_ranks import change_sizes, config_of, logits_of_ranks, planned_part

TOLERANCE = 1e-4
MUTANT_DISTANCE = 1e-3
#: Heads times dimension, hidden and intermediate size are equal.
EQUAL_SIZES = {"intermediate_size": 64, "num_hidden_layers": 2}


def test_a_norm_over_all_heads_is_that_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each KV head is on two of four ranks."""
    change_sizes(monkeypatch, "olmo3", EQUAL_SIZES)
    folder = make_tiny("olmo3", tmp_path)
    (tokens, expected), files = expected_logits(folder), resolve_model(str(folder))
    for size in (2, 4):
        assert (logits_of_ranks(files, tokens, size) - expected).abs().max() <= TOLERANCE
    monkeypatch.setattr(RankNorm, "__call__", lambda norm, x, _: RMSNorm.__call__(norm, x[0])[None])
    assert (logits_of_ranks(files, tokens, 2) - expected).abs().max() > MUTANT_DISTANCE


@pytest.mark.parametrize(("layer", "role"), [("query_key_value", "qkv"), ("query_key_value", ""), ("dense", "wide")])
def test_attention_that_its_roles_do_not_divide_is_refused(
    layer: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-NeoX has query, key and value of a head side by side: cut in three parts, they have the right shapes."""
    assert planned_part("gpt_neox", 0, 2).kv_specs()[0].num_kv_heads == 2
    monkeypatch.setitem(transformers_ranks._ROLE, layer, role)
    with pytest.raises(
        StartupError, match=r"^--tensor-parallel-size 2 .*attention 'gpt_neox.layers.0.attention' .*use 1"
    ):
        planned_part("gpt_neox", 0, 2)


def test_a_feed_forward_block_without_proof_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = planned_part("phi", 0, 2).weights_bytes()
    monkeypatch.delitem(transformers_ranks._ROLE, "fc1")
    assert planned_part("phi", 0, 2).weights_bytes() > 1.2 * divided


def test_heads_and_stages_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(StartupError, match=r"size 3 cannot divide the 4 query heads and 2 KV heads .*at most 2, or 4"):
        planned_part("olmo3", 0, 3)
    with pytest.raises(StartupError, match=r"^--pipeline-parallel-size 2 is not supported where .*'Olmo3ForCausalLM'"):
        check_ranks(config_of("olmo3"), "auto", 1, 2)
