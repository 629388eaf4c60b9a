"""An engine without a model: an executor that plays a script, its loader, and a model folder with a byte tokenizer.

A request carries its script in `SamplingParams.extra_args`, so that it works across processes: `replies` (token ids;
a sequence plays replies[seed % len]; without it the prompt is echoed) and events at an output position: `fail_at` (the
step raises), `kill_at` (the process kills itself), `interrupt_at` (it sends itself SIGINT), `wait_at` (the step waits
for the file `gate`, see `octavo_testing.gate`). Ids 0-255 are the bytes of the text; EOS is 256.
"""

import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.errors import EngineDead, StartupError
from octavo_engine.wire.plan import NewSeq, SeqResult, SeqStep, StepPlan, StepResult
from octavo_engine.wire.records import TokenLogprobs
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import MemoryTag

from octavo_testing.gate import ValveReader, pass_gate
from octavo_testing.prompt_log import PROMPT_LOG, PromptLog

if TYPE_CHECKING:
    from octavo_engine.media.processed_images import ProcessedImages
    from octavo_engine.runner.executor import ReadAdapter

EOS = 256
VOCAB_SIZE = 259
WEIGHTS_BYTES, KV_BYTES = 4096, 8192  # that `ReadyInfo` claims
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LOADER = "octavo_testing.scripted:load"
VALVE = "OCTAVO_TEST_VALVE"  # environment variable with the path of the valve
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_ids(text: str, *, eos: bool = False) -> list[int]:
    return [*text.encode(), *([EOS] if eos else [])]


def scripted(*replies: str, eos: bool = True, **fields: Any) -> SamplingParams:
    """Return parameters that make the scripted engine answer `replies`; `extra_args` takes events."""
    script = {"replies": [text_ids(reply, eos=eos) for reply in replies], **fields.pop("extra_args", {})}
    return SamplingParams(**{"max_tokens": 200, "seed": 0, **fields}, extra_args=script)


class ScriptedExecutor:
    """Keeps the state of each sequence as a runner does; a plan that names an unknown sequence raises KeyError."""

    images: "ProcessedImages | None" = None  # it takes none

    def __init__(self) -> None:
        self._valve = ValveReader(os.environ.get(VALVE))
        self._prompt_log = PromptLog(os.environ.get(PROMPT_LOG))
        self._seqs: dict[int, NewSeq] = {}
        self.plans: list[StepPlan] = []
        self.preparing: dict[str, Future[Any]] = {}
        self.advance: dict[str, Callable[[int], None]] = {}  # by location of an adapter
        self.adapters: list[str] = []
        self.is_shut_down = False
        self.released: list[MemoryTag] = []
        self.lost: set[MemoryTag] = set()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._run(plan))
        except RuntimeError as error:
            future.set_exception(error)
        return future

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Keep the function, which a test calls."""
        self.lose = call

    def prepare(self, grammar: str) -> Future[object]:
        """Return a completed future, unless a test has put another one into `preparing`."""
        return self.preparing.get(grammar) or _done()

    def prepare_adapter(self, location: str, advance: Callable[[int], None]) -> "Future[ReadAdapter]":
        """Return a completed future, unless a test has put another one into `preparing`."""
        self.advance[location] = advance
        if location in self.preparing:
            return self.preparing[location]
        future: Future[ReadAdapter] = Future()
        future.set_result(scripted_adapter(location))
        return future

    def add_adapter(self, prepared: "ReadAdapter") -> None:
        assert prepared.hash not in self.adapters
        self.adapters.append(prepared.hash)

    def remove_adapter(self, adapter: str) -> None:
        self.adapters.remove(adapter)

    def release(self, tag: MemoryTag) -> None:
        self.released.append(tag)

    def restore(self, tag: MemoryTag) -> None:
        if tag in self.lost:
            raise StartupError(f"{tag}: scripted loss.")
        self.released.remove(tag)

    def shutdown(self, reason: str | None = None) -> None:
        self.is_shut_down = True

    def _run(self, plan: StepPlan) -> StepResult:
        self._valve.wait_for_step()
        self.plans.append(plan)
        for seq_id in plan.dropped_seqs:
            self._seqs.pop(seq_id, None)
        for new in plan.new_seqs:
            self._prompt_log.write(new.token_ids[: new.num_prompt_tokens])
            self._seqs[new.seq_id] = NewSeq(
                seq_id=new.seq_id,
                token_ids=list(new.token_ids),
                num_prompt_tokens=new.num_prompt_tokens,
                params=new.params,
                seed=new.seed,
            )
        for step in plan.seqs:
            self._play_events(self._seqs[step.seq_id], step)
        return StepResult(step_id=plan.step_id, seqs=[self._answer(self._seqs[s.seq_id], s) for s in plan.seqs])

    def _play_events(self, seq: NewSeq, step: SeqStep) -> None:
        script = seq.params.extra_args or {}
        position = len(seq.token_ids) - seq.num_prompt_tokens
        if not step.sample:
            return
        if script.get("kill_at") == position:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.get("interrupt_at") == position:
            os.kill(os.getpid(), signal.SIGINT)
        if script.get("wait_at") == position:
            pass_gate(script["gate"])
        if script.get("fail_at") == position:
            raise RuntimeError("scripted failure")

    def _answer(self, seq: NewSeq, step: SeqStep) -> SeqResult:
        result = SeqResult(seq_id=seq.seq_id, token_ids=[])
        if step.num_prompt_logprobs:
            rows = range(step.start + 1, step.start + 1 + step.num_prompt_logprobs)
            result.prompt_logprobs = [_entry(seq.token_ids[i], seq.params.prompt_logprobs or 0) for i in rows]
        if step.sample:
            token = _next_token(seq)
            seq.token_ids.append(token)
            result.token_ids = [token]
            if seq.params.logprobs is not None:
                result.logprobs = [_entry(token, seq.params.logprobs)]
        return result


def _done() -> Future[object]:
    future: Future[object] = Future()
    future.set_result(None)
    return future


def _next_token(seq: NewSeq) -> int:
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    replies = (seq.params.extra_args or {}).get("replies") or [prompt]
    reply = replies[seq.seed % len(replies)]
    return int(reply[(len(seq.token_ids) - seq.num_prompt_tokens) % len(reply)])


def _entry(token_id: int, top: int) -> TokenLogprobs:
    """Return logprobs in which the chosen token is the likeliest and the next ids follow."""
    ids = [token_id, *[(token_id + k) % VOCAB_SIZE for k in range(top)]]
    return TokenLogprobs(ids, [-0.25, *[-0.25 * (k + 1) for k in range(top)]], rank=1)


def ready_info(config: EngineConfig) -> ReadyInfo:
    return ReadyInfo(
        max_model_len=config.max_model_len or 512,
        num_blocks=config.num_gpu_blocks_override or 256,
        num_host_blocks=64 if config.swap_space else 0,
        block_size=config.block_size,
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        weights_fingerprint="scripted",
        hash_root=b"scripted",
        weights_bytes=WEIGHTS_BYTES,
        kv_bytes=KV_BYTES,
        startup_s={"import": 1.5, "compile": 0.25, "weights": 40.5},
        adapters={module.name: scripted_hash(module.path) for module in config.lora_modules},
        adapter_folders={module.name: module.path for module in config.lora_modules},
        revision="scripted-commit",
    )


def scripted_hash(folder: str | Path) -> str:
    """Return the hash of an adapter that is not read: folders of one name are one adapter."""
    return f"hash of {Path(folder).name}"


class ScriptedAdapter(NamedTuple):
    hash: str
    folder: Path


def scripted_adapter(folder: str | Path) -> ScriptedAdapter:
    """Return what a read of an adapter gives."""
    return ScriptedAdapter(scripted_hash(folder), Path(folder))


def load(config: EngineConfig) -> tuple[ScriptedExecutor, ReadyInfo]:
    return ScriptedExecutor(), ready_info(config)


def load_refusing(config: EngineConfig) -> tuple[ScriptedExecutor, ReadyInfo]:
    raise StartupError("model.safetensors: tensor lm_head.weight is truncated.", code="OutOfMemory")


def load_crashing(config: EngineConfig) -> tuple[ScriptedExecutor, ReadyInfo]:
    raise RuntimeError("scripted crash while loading")


def load_never(config: EngineConfig) -> tuple[ScriptedExecutor, ReadyInfo]:
    print("loading", flush=True)
    signal.pause()
    raise AssertionError("a signal ended the pause")


def write_byte_model(folder: Path, *, more_special_tokens: Sequence[str] = ()) -> Path:
    """Write a model folder without weights (for `load_format="dummy"`): config, byte tokenizer, chat template."""
    vocab = {char: byte for byte, char in enumerate(_byte_characters())}
    added = [
        {"id": EOS + i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, token in enumerate((*SPECIAL_TOKENS, *more_special_tokens))
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "vocab_size": VOCAB_SIZE + len(more_special_tokens),
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": EOS, "bos_token_id": EOS,
        "torch_dtype": "float32",
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0], "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    files = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte, by byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (b for b in range(256) if b not in printable)
    stand_ins = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_ins[byte] for byte in range(256)]
