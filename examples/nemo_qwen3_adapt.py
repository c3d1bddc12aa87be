"""Pre-RL adaptation of a Qwen3 model's MTP head with NeMo 2.7.3: the backbone is frozen, the head learns to draft.

    torchrun --nproc-per-node 8 examples/nemo_qwen3_adapt.py --data DATA --tokenizer Qwen/Qwen3-8B --steps 1000

DATA is a prefix of Megatron's .bin/.idx files. Later NeMo releases have no `nemo.collections.llm`: there, use
examples/bridge_adapt.py. `--cpu` trains a tiny model on random tokens, whose first half is a prompt, without a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

from bebop_megatron.config import FreezeConfig, ObjectiveConfig

TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab_size": 128,
    "seq_length": 32,
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}


def random_data(options: argparse.Namespace, vocab_size: int, seq_length: int) -> Any:
    """A data module of random documents; the first half of each is no target."""
    import torch
    from lightning.pytorch import LightningDataModule
    from nemo import lightning as nl

    class RandomTokens(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            batches = {"micro_batch_size": options.micro_batch, "global_batch_size": options.global_batch}
            self.data_sampler = nl.MegatronDataSampler(seq_len=seq_length, dataloader_type="single", **batches)

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(7)
            samples = []
            for _ in range(options.steps * options.global_batch):
                text = torch.randint(vocab_size, (seq_length + 1,), generator=generator)
                samples.append(
                    {
                        "tokens": text[:-1],
                        "labels": text[1:],
                        "loss_mask": (torch.arange(seq_length) >= seq_length // 2).float(),
                        "position_ids": torch.arange(seq_length),
                    }
                )
            return torch.utils.data.DataLoader(samples, num_workers=0)

    return RandomTokens()


def make(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Model, trainer and data."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from bebop_megatron.bridges.nemo import adapt, import_llm, layer_spec, optimizer

    llm = import_llm()
    from nemo import lightning as nl

    head = {"mtp_num_layers": 3, "mtp_use_repeated_layer": True, "mtp_loss_scaling_factor": 1.0}
    sizes = TINY | {"params_dtype": torch.float32} if options.cpu else {"seq_length": options.seq_length}
    kind = llm.Qwen3Config if options.cpu else llm.Qwen3Config8B
    config = kind(transformer_layer_spec=layer_spec, **head, **sizes)
    callbacks = adapt(config, ObjectiveConfig(loss="tv"), FreezeConfig(schedule=options.schedule), attention="chain")
    adam = OptimizerConfig(optimizer="adam", lr=options.lr, weight_decay=0.0, bf16=not options.cpu)
    model = llm.GPTModel(config, optim=optimizer(adam, config))
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    strategy = nl.MegatronStrategy(tensor_model_parallel_size=options.tp, ddp=ddp, ckpt_async_save=False)
    trainer = nl.Trainer(
        accelerator="cpu" if options.cpu else "gpu",
        devices=1 if options.cpu else options.devices,
        num_nodes=options.nodes,
        max_steps=options.steps,
        strategy=strategy,
        plugins=nl.MegatronMixedPrecision(precision="32" if options.cpu else "bf16-mixed"),
        callbacks=callbacks,
        log_every_n_steps=1 if options.cpu else 10,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        logger=False,
    )
    if options.cpu:
        return model, trainer, random_data(options, config.vocab_size, config.seq_length)
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

    from bebop_megatron.data import MaskedGPTDataset

    data = llm.PreTrainingDataModule(
        paths=[options.data],
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch,
        global_batch_size=options.global_batch,
        tokenizer=AutoTokenizer(options.tokenizer),
        # reads the mask of targets beside the data, if there is one
        dataset_cls=MaskedGPTDataset,
    )
    return model, trainer, data


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--data", metavar="PREFIX", help="of .bin/.idx files, a mask of targets beside them")
    out.add_argument("--tokenizer", help="Hugging Face folder or name")
    out.add_argument("--steps", type=int, default=1000)
    out.add_argument("--schedule", default="backbone")
    out.add_argument("--lr", type=float, default=3.5e-5)
    out.add_argument("--seq-length", type=int, default=4096)
    out.add_argument("--micro-batch", type=int, default=1)
    out.add_argument("--global-batch", type=int, default=256)
    out.add_argument("--tp", type=int, default=1)
    out.add_argument("--devices", type=int, default=8)
    out.add_argument("--nodes", type=int, default=1)
    out.add_argument("--cpu", action="store_true")
    return out


def main() -> None:
    """Train."""
    options = parser().parse_args()
    if not options.cpu and not (options.data and options.tokenizer):
        parser().error("give --data and --tokenizer, or --cpu to try it on random tokens")
    if options.cpu:
        from bebop_megatron.platform import enter

        enter()
    model, trainer, data = make(options)
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
