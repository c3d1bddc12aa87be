"""Megatron runs that load a converted checkpoint under a layout, compute with it, and save it again.

Megatron is imported once; every rank of every case is a fork of that process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import shlex
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bebop_megatron.convert.importing import FLAGS_FILE

_RUN = """--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --ckpt-format torch_dist
--micro-batch-size 1 --expert-tensor-parallel-size 1 --vocab-size 96"""


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
    sys.argv = ["test", *flags, *_RUN.split(), *sizes, *case.flags]
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


def run_case(case: Case) -> dict[str, torch.Tensor]:
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


def _rank_main(rank: int, world: int, folder: str, port: int, cases: dict[str, Case]) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    limit = timedelta(seconds=60)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    # Megatron would start a Python process per rank for a queue that only its asynchronous writer needs
    filesystem_async._results_queue = queue.Queue()
    out: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            out[name] = run_case(case)
        except BaseException:  # noqa: BLE001 - the parent shows every rank's failure
            out[name] = {"error": traceback.format_exc()}
            break
    torch.save(out, f"{folder}/rank{rank}.pt")
    # ranks that failed leave at once: the others must not wait for them
    os._exit(0)


def _worlds_main(folder: str, worlds: dict[int, dict[str, Case]]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    # Megatron prints every argument
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    from bebop_megatron.mcore import install
    from bebop_megatron.platform import enter

    enter()
    install()
    import megatron.core.dist_checkpointing
    import megatron.training.argument_utils
    import megatron.training.arguments  # noqa: F401

    fork = multiprocessing.get_context("fork")
    for world, cases in worlds.items():
        inside = f"{folder}/{world}"
        os.mkdir(inside)
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [fork.Process(target=_rank_main, args=(r, world, inside, store.port, cases)) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


def run(worlds: dict[int, dict[str, Case]]) -> dict[str, dict[str, torch.Tensor]]:
    """Run each table of cases in its world of processes: name -> what rank 0 computed.

    Raises:
        AssertionError: with the traceback of every rank that failed.
    """
    results: dict[str, dict[str, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        parent = multiprocessing.get_context("spawn").Process(target=_worlds_main, args=(folder, worlds))
        parent.start()
        parent.join()
        for world, cases in worlds.items():
            ranks = [torch.load(Path(folder) / str(world) / f"rank{r}.pt", weights_only=True) for r in range(world)]
            for name in cases:
                errors = [r[name]["error"] for r in ranks if "error" in r.get(name, {})]
                assert not errors, f"{name}:\n" + "\n".join(errors)
                results[name] = ranks[0][name]
    return results
