"""Megatron runs that load a converted checkpoint under a layout, compute with it, and save it again."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop_megatron.convert.importing import FLAGS_FILE
from bebop_megatron.platform.flags import ON_CPU, UNFUSED
from tests.worlds import run_worlds

_RUN = "--ckpt-format torch_dist --micro-batch-size 1 --expert-tensor-parallel-size 1 --vocab-size 96"


@dataclass(frozen=True)
class Case:
    """A checkpoint, a layout, where to save what was loaded, and the ids to compute with, if any."""

    load: str
    save: str
    tp: int = 1
    pp: int = 1
    ids: torch.Tensor | None = None
    flags: tuple[str, ...] = ()


def _arguments(case: Case) -> Any:
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_args, unset_global_variables

    flags = shlex.split((Path(case.load) / FLAGS_FILE).read_text())
    if case.pp > 1 and "--hybrid-layer-pattern" in flags:
        at = flags.index("--hybrid-layer-pattern") + 1
        main, *head = flags[at].split("/")
        flags[at] = "/".join([main[: len(main) // 2] + "|" + main[len(main) // 2 :], *head])
    sizes = ["--tensor-model-parallel-size", str(case.tp), "--pipeline-model-parallel-size", str(case.pp)]
    if case.tp > 1 and "--num-experts" in flags:
        sizes.append("--sequence-parallel")
    sys.argv = ["test", *flags, *ON_CPU, *UNFUSED, *_RUN.split(), *sizes, *case.flags]
    args = parse_args()
    validate_args(args)
    unset_global_variables()
    set_args(args)
    return args


def _build(case: Case, args: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    from bebop_megatron.mcore.spec import use_mtp_attention
    from bebop_megatron.pretrain import embedding_ranks
    from tests.mcore.groups import join_groups

    config = hybrid_config_from_args(args) if args.hybrid_layer_pattern else gpt_config_from_args(args)
    if args.experimental_attention_variant:
        use_mtp_attention(config, "per-depth")
    tied = config.share_embeddings_and_output_weights
    join_groups(
        case.tp,
        case.pp,
        expert_tensor_parallel_size=1,
        embedding_ranks=lambda ranks: embedding_ranks(config.transformer, ranks, tied),
    )
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False, data_parallel_random_init=False)
    return model.eval()


def _computed(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits [b, s, v], and final-normed hidden states [1 + depths, s, b, h] behind the MTP block."""
    kept: list[torch.Tensor] = []
    handle = model.mtp.register_forward_hook(lambda module, inputs, output: kept.append(output))
    position_ids = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        logits = model(ids, position_ids, None)
    handle.remove()
    return {"logits": logits, "hidden": kept[0].unflatten(0, (1 + model.config.mtp_num_layers, -1))}


def run_case(case: Case, unused: Path) -> dict[str, torch.Tensor]:
    """One case on this rank."""
    from megatron.core import dist_checkpointing, parallel_state

    args = _arguments(case)
    model = _build(case, args)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    metadata |= {"singleton_local_shards": False}
    for parameter in model.parameters():
        # what the checkpoint lacks must show
        parameter.data.fill_(float("nan"))
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    folder = str(Path(case.load) / "release")
    loaded, unread, absent = dist_checkpointing.load(state, folder, strict="return_all")
    # other backends keep a state for more modules than this one
    assert not absent, absent
    assert all(key.endswith("._extra_state") for key in unread), unread
    model.load_state_dict(loaded["model"], strict=True)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    out = {} if case.ids is None else _computed(model, case.ids)
    folder = Path(case.save) / "iter_0000007"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
        (Path(case.save) / "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()
    state = {"model": model.sharded_state_dict(metadata=metadata), "args": args}
    state |= {"checkpoint_version": 3.0, "iteration": 7}
    dist_checkpointing.save(state, str(folder))
    torch.distributed.barrier()
    return out


def run(worlds: dict[int, dict[str, Case]]) -> dict[str, dict[str, torch.Tensor]]:
    """Run each table of cases in its world of processes: name -> what rank 0 computed.

    Raises:
        AssertionError: with the traceback of every rank that failed.
    """
    found = run_worlds(run_case, worlds)
    return {name: ranks[0] for cases in found.values() for name, ranks in cases.items()}
