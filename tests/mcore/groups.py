"""Megatron's process groups in a world that goes through many layouts."""

from __future__ import annotations

import gc
from typing import Any

_joined: dict[str, Any] = {}


def join_groups(tp: int = 1, pp: int = 1, *, embedding_ranks: Any = None, **sizes: Any) -> None:
    """Groups of a layout, as `initialize_model_parallel` takes it; `embedding_ranks` is its `get_embedding_ranks`.

    The last layout's groups are kept if they fit again. Each gloo group holds threads, so groups of another layout are
    given back first: a world would end with thousands.

    Collectives: a barrier, so that no rank leaves a group that another still uses.
    """
    import torch
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    wanted = {"tp": tp, "pp": pp, **sizes}
    if embedding_ranks is not None:
        wanted["embedding stages"] = embedding_ranks(list(range(pp)))
        sizes["get_embedding_ranks"] = embedding_ranks
    if _joined == wanted:
        return
    _joined.clear()
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    gc.collect()
    for group in [g for g in distributed_c10d._world.pg_map if g is not torch.distributed.group.WORLD]:
        torch.distributed.destroy_process_group(group)
    parallel_state.initialize_model_parallel(tp, pp, **sizes)
    _joined.update(wanted)
