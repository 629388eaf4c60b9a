"""The pre-tokenizers that split text before byte-level BPE, by the name in a GGUF file's `tokenizer.ggml.pre`.

Each kind is a list of regular expressions, as in the models' own `tokenizer.json`. Each expression splits the pieces
that the previous expression has left; text that it does not match remains a piece of its own.
The names and their meanings are llama.cpp's, whose converter writes them. An unknown name raises an error: with a wrong
split a model still answers, but worse.
"""

import re
from dataclasses import dataclass

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CJK = r"[一-龥\x{3040}-ゟ゠-ヿ]+"
_CODE_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_NORDIC = r" ?[^(\s|.,!?…。，、।۔،)]+"
#: The cased letters of the Unicode version of DeepSeek's first tokenizer, as code points.
_DEEPSEEK_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77
1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE
1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124
2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3
A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A
10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""


def _char_class(code_points: str) -> str:
    """Build a character class in Oniguruma's syntax from hexadecimal code points and ranges."""
    return "[" + re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", code_points).replace("\n", "").replace(" ", "") + "]"


def _words(digits: str, words: str = _WORDS, symbols: str = _SYMBOLS) -> str:
    return rf"{_CONTRACTIONS}|{words}|{digits}|{symbols}|{_SPACES}"


def _cased(digits: str, suffix: str) -> str:
    return "|".join((*(word + suffix for word in _CASED_WORDS), digits, _PATHS, _SPACES))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One kind. `ignore_merges`: a piece that is in the vocabulary becomes its token without merging."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3_PATTERN = _words(r"\p{N}{1,3}")
_QWEN2_PATTERN = _words(r"\p{N}")

_LLAMA3 = PreTokenizer(patterns=(_LLAMA3_PATTERN,), ignore_merges=True, add_bos=True)
_LLAMA3_MERGING = PreTokenizer(patterns=(_LLAMA3_PATTERN,))
_QWEN2 = PreTokenizer(patterns=(_QWEN2_PATTERN,))
_GPT2_KIND = PreTokenizer(patterns=(_GPT2,))
_DIGITS_GPT2 = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_DEEPSEEK3 = PreTokenizer(
    patterns=(r"\p{N}{1,3}", _CJK, rf"{_CODE_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"),
)
_GPT4O = PreTokenizer(patterns=(_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))
_BAILING = PreTokenizer(
    patterns=(rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3_MERGING),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(patterns=(_LLAMA3_PATTERN,), ignore_merges=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2
    ),
    "qwen35": PreTokenizer(
        patterns=(_words(r"\p{N}", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "exaone4"), _GPT2_KIND
    ),
    "granite-docling": _GPT2_KIND,
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2
    ),
    "falcon": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?{_char_class(_DEEPSEEK_LETTERS)}+",
            r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
            r"\s+$",
            r"[一-龥\x{800}-一가-\x{D7FF}]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥\x{800}-一가-\x{D7FF}]+", r"\p{N}")
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "tekken": PreTokenizer(patterns=(_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer(patterns=(_words(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer(patterns=(_NORDIC,))),
    "viking": PreTokenizer(patterns=(_NORDIC, r"\p{N}")),
}
