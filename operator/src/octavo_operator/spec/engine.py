"""Models of `spec.engine` and `spec.parallelism`: how each replica runs."""

import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from octavo_operator.spec.fields import Image, Name, Quantity, SpecPart
from octavo_operator.spec.pod_template import PodTemplate

Tokens = Annotated[int, Field(ge=1, le=16777216)]
ExtraArgs = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...], Field(max_length=64)]
ToolCallParser = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "mimo",
    "step3p5",
    "seed_oss",
    "glm45",
    "glm47",
    "poolside_v1",
    "hy_v3",
    "minimax_m2",
    "deepseek_v32",
    "deepseek_v4",
    "step3",
    "minicpm5",
]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
#: Pattern of flags that `extraArgs` may not contain: a field of the spec stands for them, or the operator sets them.
RESERVED_FLAGS = (
    "--(no-)?(config|model|revision|served-model-name|tokenizer|chat-template|dtype|device|host|port|max-model-len|"
    "max-num-seqs|max-num-batched-tokens|block-size|gpu-memory-utilization|kv-cache-memory-bytes|swap-space|"
    "lora-modules-file|enable-prefix-caching|tensor-parallel-size|pipeline-parallel-size|nnodes|node-rank|"
    "master-addr|master-port|headless|api-key|api-key-file|router-secret|router-secret-file|router-only|"
    "drain-timeout|shutdown-timeout|cache-isolation|uds|ssl-[a-z-]+)|-tp?|-pp|-[nr].*"
)


#: Pattern of each item of `extraArgs`: a flag, with its value if it has one.
FLAG = "^--?[A-Za-z]"


def are_flags(args: Iterable[str]) -> bool:
    """Return whether all arguments are flags, not positional arguments or values of the flags before them."""
    return all(re.match(FLAG, arg) for arg in args)


def sets_any(args: Iterable[str], flags: str) -> bool:
    """Return whether an argument sets one of these flags, in any spelling that `octavo` accepts. `flags`: a pattern."""
    names = (arg.partition("=")[0].replace("_", "-") for arg in args)
    return any(re.fullmatch(flags, name) for name in names)


class KeyRef(SpecPart):
    name: Name
    key: Name
    optional: bool | None = None


class ValueSource(SpecPart):
    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.secret_key_ref is None) == (self.config_map_key_ref is None):
            raise ValueError("valueFrom needs exactly one of secretKeyRef and configMapKeyRef")
        return self


#: The only variable of vLLM that sets what the operator must set.
KEY_VARIABLE = "VLLM_API_KEY"


class EnvVar(SpecPart):
    name: Annotated[str, Field(min_length=1, max_length=253, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Annotated[str, Field(max_length=32768)] | None = None
    value_from: ValueSource | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.name.startswith("OCTAVO_"):
            raise ValueError("names that begin with OCTAVO_ are reserved for the operator")
        if self.name == KEY_VARIABLE:
            raise ValueError(
                "VLLM_API_KEY would be a key beside those of auth: list it in the Secret of auth.apiKeysSecretRef"
            )
        if self.value is not None and self.value_from is not None:
            raise ValueError("give value or valueFrom, not both")
        return self


class Engine(SpecPart):
    image: Image | None = None
    image_pull_policy: PullPolicy | None = None
    device: Literal["cpu", "cuda"] | None = None
    max_model_len: Tokens | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = None
    max_num_batched_tokens: Tokens | None = None
    block_size: Literal[8, 16, 32, 64, 128] | None = None
    gpu_memory_utilization_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    kv_cache_memory: Quantity | None = None
    swap_space: Quantity | None = None
    prefix_caching: bool | None = None
    tool_call_parser: ToolCallParser | None = None
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = None
    extra_args: ExtraArgs = ()
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    pod_template: PodTemplate | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if sets_any(self.extra_args, RESERVED_FLAGS):
            raise ValueError(
                "engine.extraArgs repeats a flag that the operator sets: use the field of the spec that stands for it "
                "(model.*, engine.*, parallelism.*, auth.*, drain.*)"
            )
        if not are_flags(self.extra_args):
            raise ValueError(
                "engine.extraArgs has an item that is no flag: write a flag and its value as one item, --flag=value"
            )
        if self.gpu_memory_utilization_percent is not None and self.kv_cache_memory is not None:
            raise ValueError(
                "engine.kvCacheMemory says how much memory the KV cache gets, gpuMemoryUtilizationPercent how it is "
                "derived: set one of them"
            )
        if len({variable.name for variable in self.env}) != len(self.env):
            raise ValueError("engine.env has a name twice: list each name once")
        return self


class Parallelism(SpecPart):
    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    pipeline: Annotated[int, Field(ge=1, le=64)] | None = None
    nodes: Annotated[int, Field(ge=1, le=64)] | None = None

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        if (self.tensor or 1) * (self.pipeline or 1) % (self.nodes or 1):
            raise ValueError(
                "parallelism.nodes must divide the ranks of a replica evenly: make tensor times pipeline a multiple of "
                "nodes"
            )
        return self
