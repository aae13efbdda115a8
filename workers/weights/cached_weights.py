"""A checkpoint whose linear layers were packed before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from airside.workers.linear import Linear, PackedLinear
from airside.workers.weights.load_times import LoadTimes
from airside.workers.weights.packed_cache import PackedCache
from airside.workers.weights.weight_source import WHOLE, MatrixPart, WeightSource


class CachedWeights:
    """A WeightSource in front of another: what the cache has is not read from the checkpoint."""

    def __init__(self, source: WeightSource, cache: PackedCache, times: LoadTimes) -> None:
        self._source = source
        self._cache = cache
        self._times = times

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def read(self, name: str, shape: tuple[int, ...], rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        return self._source.read(name, shape, rows, columns)

    def table(self, name: str, shape: tuple[int, int], rows: slice = WHOLE) -> Tensor:
        return self._source.table(name, shape, rows)

    def linear(self, parts: Sequence[MatrixPart], bias: Tensor | None = None) -> Linear:
        key = " ".join(map(_name, parts))
        with self._times.phase("cache"):
            packed = self._cache.find(key)
        if packed is not None:
            return PackedLinear(packed, bias)
        made = self._source.linear(parts, bias)
        if isinstance(made, PackedLinear):
            self._cache.keep(key, made.weight)
        return made


def _name(part: MatrixPart) -> str:
    rows, columns = (range(size)[some] for size, some in zip(part.shape, (part.rows, part.columns), strict=True))
    return f"{part.name}[{rows.start}:{rows.stop},{columns.start}:{columns.stop}]"
