"""A model's layers as one native call per step.

A model's `forward` is recorded once, on tensors as large as the largest step: its operators note themselves down
instead of computing (`csrc/kernels/cpu/program.h`). A step copies its inputs into the first rows of those tensors and
runs the program over as many rows as it has. The operators are those that `forward` calls itself, so the results are
the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from airside.proto.settings import WorkerSettings
from airside.workers import ops
from airside.workers.kv_cache import LayerCache
from airside.workers.model_config import ModelConfig
from airside.workers.models.causal_model import CausalModel
from airside.workers.step_batch import HostBatch, Rows, StepBatch
from airside.workers.workspace import Workspace

log = logging.getLogger(__name__)

_WORKSPACE_BYTES = 4 * 1024**3  # of address space; what is touched is the peak of the layers' tensors


class NotRecordableError(Exception):
    """The model computes something that is no operator of `ops`."""


class _Recorder(TorchDispatchMode):
    """While it is entered, torch may make views and empty tensors, which come from `workspace`, and nothing else."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, to be told that there is nothing to compile here: 47 MB and a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # Any: whatever torch's operators take and return
        kwargs = kwargs or {}
        if func.is_view:
            made = func(*args, **kwargs)
            if _shares_memory(args[0], made):
                return made
            raise NotRecordableError(f"forward copies by {func}")
        if func is torch.ops.aten.empty_like.default:
            return self._workspace.empty(tuple(args[0].shape), args[0].dtype)
        if func is torch.ops.aten.empty.memory_format:
            return self._workspace.empty(tuple(args[0]), kwargs["dtype"])
        raise NotRecordableError(f"forward calls {func}")


def _shares_memory(base: Tensor, made: Tensor | Sequence[Tensor]) -> bool:
    """Whether an operator that may make views has made some: `reshape`, for one, copies where it must."""
    views = [made] if isinstance(made, Tensor) else made
    return all(view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() for view in views)


class StepProgram:
    """The recorded `forward` of a model on its cache."""

    def __init__(
        self,
        program: ops.Program,
        batch: StepBatch,
        hidden: Tensor,
        final: Tensor,
        workspace: Workspace,
        max_positions: int,
    ) -> None:
        self.program = program
        self._max_positions = max_positions
        self._inputs = batch.host
        self._hidden = hidden
        self._final = final
        self._workspace = workspace  # where the program's tensors were, and are
        self.workspace_bytes = workspace.peak_bytes

    @staticmethod
    @torch.inference_mode()
    def record(
        model: CausalModel, config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype, cache: list[LayerCache]
    ) -> StepProgram | None:
        """None where `forward` has to be called step by step: it does more than `ops`, or the device records none."""
        if (
            cache[0].k.device.type != "cpu"
            or config.engram is not None
            or config.num_attention_layers < config.num_layers
        ):
            return None
        batch = _largest_batch(settings)
        hidden = torch.zeros((len(batch.positions), config.hidden_size), dtype=dtype)
        try:
            workspace = Workspace(_WORKSPACE_BYTES)
            with (
                ops.Recording(len(batch.positions), len(batch.context_lens), len(batch.wanted)) as recording,
                _Recorder(workspace),
            ):
                final = model.forward(hidden, batch, cache)
        except (NotRecordableError, MemoryError) as error:
            log.info("steps are not recorded: %s", error)
            return None
        program = recording.program()
        log.info("recorded ops=%d workspace_bytes=%d", len(program.names), workspace.peak_bytes)
        return StepProgram(program, batch, hidden, final, workspace, settings.max_model_len)

    def fits(self, batch: StepBatch) -> bool:
        """Whether the step is one of those recorded: causal, with positions on one axis."""
        return batch.attend_to is None and batch.positions.ndim == 1

    def run(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """As `CausalModel.forward`; the result lasts until the next call."""
        into, host = self._inputs, batch.host
        num_tokens, num_seqs, num_wanted = len(hidden), len(host.context_lens), len(host.wanted)
        # The one thing that `build_step_batch` cannot check, and operators do not. As unsigned numbers, so that
        # negative ones are too large.
        most = np.maximum.reduce(host.positions.view(np.uint32))
        assert most < self._max_positions, "a position is not in the rotary table"
        self._hidden[:num_tokens].copy_(hidden)
        into.positions[:num_tokens] = host.positions
        into.slots[:num_tokens] = host.slots
        into.block_tables[:num_seqs, : host.block_tables.shape[1]] = host.block_tables
        into.query_starts[: num_seqs + 1] = host.query_starts
        into.context_lens[:num_seqs] = host.context_lens
        into.wanted[:num_wanted] = host.wanted
        self.program.run(num_tokens, num_seqs, num_wanted)
        return self._final[:num_wanted]


_NOTHING = np.empty(0, np.int32)
_NO_ROWS = Rows(np.empty(0, np.uint64), _NOTHING, _NOTHING, _NOTHING, _NOTHING, np.empty(0, np.int64))


def _largest_batch(settings: WorkerSettings) -> StepBatch:
    """As many tokens, sequences and blocks as a step may have, and one wanted row more (see program.h)."""
    tokens, seqs = max(2, settings.max_num_batched_tokens), settings.max_num_seqs
    blocks = -(-settings.max_model_len // settings.block_size)

    def zeros(*shape: int) -> NDArray[np.int32]:
        return np.zeros(shape, np.int32)

    host = HostBatch(
        positions=zeros(tokens),
        slots=np.zeros(tokens, np.int64),
        block_tables=zeros(seqs, blocks),
        query_starts=zeros(seqs + 1),
        context_lens=zeros(seqs),
        wanted=np.zeros(tokens + 1, np.int64),
        num_positions=0,
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    return StepBatch(
        positions=torch.from_numpy(host.positions),
        slots=torch.from_numpy(host.slots),
        block_tables=torch.from_numpy(host.block_tables),
        query_starts=torch.from_numpy(host.query_starts),
        context_lens=torch.from_numpy(host.context_lens),
        token_ids=nothing,
        sampled=nothing,
        prompt_scored=nothing,
        wanted=torch.from_numpy(host.wanted),
        state_slots=None,
        state_from=None,
        tail_ids=None,
        rows=_NO_ROWS,
        host=host,
    )
