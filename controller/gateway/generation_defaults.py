"""What a sampling field that was left out means for this checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values of the sampling fields that a request leaves out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def from_checkpoint(cls, generation_config: Mapping[str, Any]) -> Self:  # Any: JSON
        """From `generation_config.json`. A `do_sample` that says false is greedy, whatever else the file says.

        The file's `max_new_tokens` and penalties are not taken over: lengths are the request's business.
        """
        found = {name: generation_config.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
        defaults = cls().overridden({name: value for name, value in found.items() if value is not None})
        return replace(defaults, temperature=0.0) if generation_config.get("do_sample") is False else defaults

    def overridden(self, values: Mapping[str, float]) -> Self:
        """With some values replaced, by field name. Negative `top_k` means all tokens, as 0 does."""
        known = {name: float(values[name]) for name in ("temperature", "top_p", "min_p") if name in values}
        top_k = max(0, int(values.get("top_k", self.top_k)))
        return replace(self, top_k=top_k, **known)
