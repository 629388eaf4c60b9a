"""Has `LoRARequest` at vLLM's place, for scripts that import it from there."""

from octavo_engine.offline.script_types import LoRARequest

__all__ = ["LoRARequest"]
