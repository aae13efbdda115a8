"""Airside: a distributed server for text and image-to-text models.

`LLM`, what it takes and what it returns are here for offline use. They are imported when first asked for, since every
process of a cluster imports this package and few need them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airside.cluster.offline import LLM, Completion, OfflineError, RequestOutput, SamplingParams, Score

__all__ = ["LLM", "Completion", "OfflineError", "RequestOutput", "SamplingParams", "Score"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'airside' has no attribute {name!r}")
    from airside.cluster import offline

    return getattr(offline, name)
