"""Every kernel test runs once per instruction set that was built and that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from airside.workers import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=["baseline", "avx2", "avx512", "avx512_bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library = ops._library("cpu")
    before = library.isa()
    if not library.set_isa(request.param):
        pytest.skip(f"{request.param} is not built or not in this processor")
    yield request.param
    library.set_isa(before)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
