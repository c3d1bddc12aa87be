"""Trains as `examples/nemo_qwen3_adapt.py --cpu` does, through two freeze phases, and once more without NeMo.

Writes into the file it is given: what NeMo's trainer logged at each step, parameters and Adam moments before each step
and after the last, and what Megatron's own schedule computes from the first parameters and the first batch.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nemo_qwen3_adapt.py"
ARGUMENTS = "--cpu --steps 4 --schedule backbone:2,mtp:2 --lr 1e-2 --micro-batch 2 --global-batch 4".split()


def _inner(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _state(trainer: Any) -> dict[str, torch.Tensor]:
    (optimizer,) = trainer.optimizers
    state = {}
    names = {id(parameter): name for name, parameter in _inner(trainer.model).named_parameters()}
    for name, parameter in _inner(trainer.model).named_parameters():
        state[name] = parameter.detach().clone()
    for inner in getattr(optimizer.mcore_optimizer, "chained_optimizers", [optimizer.mcore_optimizer]):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment in inner.optimizer.state[parameter]:
                        value = inner.optimizer.state[parameter][moment].clone()
                        state[f"{names[id(parameter)]}/{moment}"] = value
    return state


def _reference(config: Any, parameters: dict[str, torch.Tensor], samples: list[Any]) -> dict[str, float]:
    """Objective and acceptance of one global batch, without anything of NeMo."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    from bebop_megatron.config import ObjectiveConfig
    from bebop_megatron.mcore import attach, attached
    from bebop_megatron.mcore.logging import gather
    from bebop_megatron.mcore.mtp_attention import set_mtp_attention

    names = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("normalization", "gated_linear_unit", "activation_func", "add_bias_linear", "qk_layernorm"),
        *("attention_dropout", "hidden_dropout", "layernorm_epsilon", "mtp_num_layers", "mtp_use_repeated_layer"),
        *("mtp_loss_scaling_factor", "use_cpu_initialization", "persist_layer_norm", "masked_softmax_fusion"),
        *("bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion", "params_dtype"),
    )
    plain = TransformerConfig(**{name: getattr(config, name) for name in names})
    attach(plain, ObjectiveConfig(loss="tv"), vocab_size=config.vocab_size)
    set_mtp_attention(plain, "chain")
    layer = gpt_layer_specs.get_gpt_decoder_block_spec(plain, use_transformer_engine=True, normalization="RMSNorm")
    model = GPTModel(
        plain,
        layer,
        vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        rotary_percent=config.rotary_percent,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(plain, layer, use_transformer_engine=False),
    )
    model.load_state_dict({k: v for k, v in parameters.items() if "/" not in k}, strict=False)
    missing = {name for name, _ in model.named_parameters()} ^ {name for name in parameters if "/" not in name}
    assert not missing, missing

    def step(iterator: Any, module: Any) -> Any:
        batch = next(iterator)
        mask = batch["loss_mask"]
        output = module(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
        )

        def loss(losses: torch.Tensor) -> Any:
            total = (losses * mask).sum() / mask.sum()
            # the schedule divides the loss in place
            return total, {"lm loss": total.detach().clone()}

        return output, loss

    collate = torch.utils.data.default_collate
    batches = [collate(samples[i : i + 2]) for i in range(0, len(samples), 2)]
    lm = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=config.seq_length,
        micro_batch_size=2,
        forward_only=False,
    )
    values = gather(attached(plain), torch.nn.Module())
    return values | {"lm loss": float(sum(x["lm loss"] for x in lm) / len(lm))}


def main() -> None:
    """Train, then compute the reference."""
    from bebop_megatron.platform import enter

    enter()
    from lightning.pytorch.callbacks import Callback

    example = runpy.run_path(str(EXAMPLE), run_name="example")
    model, trainer, data = example["make"](example["parser"]().parse_args(ARGUMENTS))
    states, logged = [], []

    class Recorder(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            states.append(_state(trainer))

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            states.append(_state(trainer))

    trainer.callbacks.append(Recorder())
    trainer.fit(model, data)
    samples = list(data.train_dataloader().dataset)
    reference = _reference(model.config, states[0], samples[:4])
    torch.save({"states": states, "logged": logged, "reference": reference}, sys.argv[1])


if __name__ == "__main__":
    main()
