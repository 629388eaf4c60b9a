"""One stream of Octavo and of llama.cpp over the same GGUF file, in turn, and the memory that each takes.

By default, the file has the shape of TinyLlama-1.1B and random blocks.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gguf
import numpy as np
from engine_process import ENGINES, EngineProcess
from gguf.constants import GGMLQuantizationType
from machine import cores, processor
from table import Samples, print_table
from workload import Workload

SIZE, INNER_SIZE, KV_SIZE, HEADS, KV_HEADS, VOCAB = 2048, 5632, 256, 32, 4, 32000
SPECIAL = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
CONTEXT = 2048
#: Types of random files: of most matrices, and of those that llama.cpp's mixtures keep more exact.
FORMATS = {"Q4_0": ("Q4_0", "Q4_0"), "Q4_K_M": ("Q4_K", "Q6_K"), "Q8_0": ("Q8_0", "Q8_0")}
EXACT = ("output.weight", "attn_v.weight", "ffn_down.weight")
#: Where the fp16 numbers of a block are, and their value.
NUMBERS = {"Q4_0": ((0,), 4e-3), "Q8_0": ((0,), 3e-4), "Q4_K": ((0, 2), 1e-4), "Q6_K": ((208,), 1e-5)}


def write_file(path: Path, layers: int, format_name: str = "Q4_0") -> None:
    """Write a Llama of TinyLlama's shape; tokens beyond the bytes have names without a meaning."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(INNER_SIZE)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SIZE // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("llama")
    tokens = [*SPECIAL, *(f"t{i}" for i in range(VOCAB - len(SPECIAL)))]
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(VOCAB)])
    kinds = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
    writer.add_token_types([*kinds, *(VOCAB - len(SPECIAL)) * [gguf.TokenType.NORMAL]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = np.random.default_rng(0)
    for name, shape in tensors(layers):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        kind = GGMLQuantizationType[FORMATS[format_name][name.endswith(EXACT)]]
        values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        places, number = NUMBERS[kind.name]
        blocks = generator.integers(0, 256, (shape[0], shape[1] // values, num_bytes), dtype=np.uint8)
        for at in places:
            blocks[..., at : at + 2] = np.array([number], np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("token_embd.weight", (VOCAB, SIZE)), ("output.weight", (VOCAB, SIZE)), ("output_norm.weight", (SIZE,)))
    for layer in range(layers):
        parts = {
            **dict.fromkeys(("attn_norm", "ffn_norm"), (SIZE,)),
            **dict.fromkeys(("attn_q", "attn_output"), (SIZE, SIZE)),
            **dict.fromkeys(("attn_k", "attn_v"), (KV_SIZE, SIZE)),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (INNER_SIZE, SIZE)),
            "ffn_down": (SIZE, INNER_SIZE),
        }
        for part, shape in parts.items():
            yield f"blk.{layer}.{part}.weight", shape


def engines(model: Path, llama_server: Path | None, logs: Path) -> list[EngineProcess]:
    command = [sys.executable, str(ENGINES / "octavo.py"), str(model), str(CONTEXT), "1", "auto"]
    found = [EngineProcess("octavo", command, env={}, log=logs / "octavo.log")]
    if llama_server is not None:
        command = ["python3", str(ENGINES / "llama_cpp.py"), str(llama_server), str(model), "1", "512", str(cores())]
        found.append(EngineProcess("llama.cpp", command, env={}, log=logs / "llama.cpp.log"))
    return found


def tokens_per_s(engine: EngineProcess, tokens: int, repetition: int) -> float:
    """Return the tokens per second after the first one."""
    ids = [1000 + i % 30000 for i in Workload().stream(repetition)]
    engine.generate([ids], 1)
    first_s = engine.seconds([ids], 1)
    return tokens / (engine.seconds([ids], tokens + 1) - first_s)


@contextmanager
def model_file(model: Path | None, layers: int, format_name: str) -> Iterator[Path]:
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"tinyllama-{format_name}.gguf"
        write_file(path, layers, format_name)
        yield path


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare one stream over a GGUF file with llama.cpp's.")
    parser.add_argument("--model", type=Path, help="GGUF file. Default: random blocks in TinyLlama-1.1B's shape")
    parser.add_argument("--format", choices=FORMATS, default="Q4_0", help="types of the random file. Default: Q4_0")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server. Default: Octavo alone")
    parser.add_argument("--repetitions", type=int, default=5, help="samples of each engine. Default: 5")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the stream. Default: 64")
    parser.add_argument("--layers", type=int, default=22, help="layers of the random file. Default: 22")
    arguments = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="octavo-bench-"))
    with model_file(arguments.model, arguments.layers, arguments.format) as model, ExitStack() as stack:
        both = engines(model, arguments.llama_server, logs)
        samples: list[list[float]] = [[] for _ in both]
        for engine in both:
            stack.enter_context(engine)
        for repetition in range(arguments.repetitions):
            for engine, values in zip(both, samples, strict=True):
                with engine.turn():
                    values.append(tokens_per_s(engine, arguments.tokens, repetition))
        found = [Samples(tuple(values)) for values in samples]
        megabytes = [engine.peak_bytes() / 1e6 for engine in both]
        print(f"{processor()}\nlogs of the engines: {logs}\nfile: {model.stat().st_size / 1e6:.0f} MB")
    rows = [
        (engine.name, speed, f"{size:.0f}", f"{engine.load_s:.1f}")
        for engine, speed, size in zip(both, found, megabytes, strict=True)
    ]
    print_table("one stream: median [min, max]", ("engine", "tokens/s", "peak MB", "load s"), rows)
    if len(found) > 1:
        print(f"\noctavo / llama.cpp: {found[0].median / found[1].median:.2f}")


if __name__ == "__main__":
    main()
