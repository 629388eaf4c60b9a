"""Tests of the kernels, which also run if OCTAVO_NATIVE=0 prevents the engine from loading the kernels."""

from collections.abc import Iterator

import pytest
from octavo_engine.ops.native_library import native_library
from octavo_testing.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="package", autouse=True)
def _kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OCTAVO_NATIVE", raising=False)
        native_library.cache_clear()
        yield
    native_library.cache_clear()
