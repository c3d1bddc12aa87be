"""Our objective and freeze schedule on any model of Megatron Bridge (0.6.2).

```python
from bebop_megatron.bridges.megatron_bridge import adapt, forward_step
callbacks = adapt(cfg, ObjectiveConfig(loss="tv"), FreezeConfig(schedule="backbone"), attention="chain")
pretrain(cfg, forward_step, callbacks=callbacks)
```

`cfg` is Bridge's `ConfigContainer`, its model a provider or a model config. Use our `forward_step`: Bridge's own keeps
the loss mask from the model, and the MTP head would train on prompts and padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bebop_megatron.config import FreezeConfig, MetricsConfig, ObjectiveConfig
from bebop_megatron.optional import require

BRIDGE_VERSIONS = ("0.6.2",)


def require_bridge() -> None:
    """See that Megatron Bridge is there.

    Raises:
        RuntimeError: it is not; says what to install.
    """
    require(
        "megatron.bridge",
        "Megatron Bridge is not installed: pip install 'bebop-megatron[bridge]' in an environment of its own, or "
        "take a NeMo framework container that brings it. docs/integration.md says which versions",
    )


def transformer_config(model: Any) -> Any:
    """The transformer config of a provider, which is one itself, or of a model config, which holds one."""
    return getattr(model, "transformer", model)


def adapt(
    container: Any,
    objective: ObjectiveConfig,
    freezing: FreezeConfig | None = None,
    *,
    attention: str | None = None,
    metrics: MetricsConfig | None = None,
) -> list[Any]:
    """Have a ConfigContainer's model trained on our objective; -> callbacks for Bridge's `pretrain` or `finetune`.

    Set the model's MTP layers before (`mtp_num_layers`, and `mtp_use_repeated_layer` for one head applied at every
    depth), and call it before Bridge builds the model. `attention` is what `--mtp-attention` says on a command line.

    Raises:
        RuntimeError: Megatron Bridge is not installed, or lacks a name that we rely on.
        ValueError: settings that do not go together, in the words of the command line's flags.
    """
    require_bridge()
    from bebop_megatron.mcore import attach, install
    from bebop_megatron.mcore.bridge_loop import follow_training
    from bebop_megatron.mcore.mtp_attention import set_mtp_attention

    config = transformer_config(container.model)
    install()
    attach(config, objective, metrics=metrics)
    if attention is not None or objective.loss is not None:
        set_mtp_attention(config, attention)
    return follow_training(container, config, freezing or FreezeConfig(), objective)


def forward_step(
    state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, partial[Any]]:
    """Bridge's forward step for GPT and hybrid models, with the loss mask handed to the model for the MTP loss.

    Shape: a batch of tokens, labels and loss_mask [b, s] -> losses [b, s], and the function that sums them.
    """
    from megatron.bridge.training.gpt_step import get_batch
    from megatron.bridge.training.losses import masked_next_token_loss
    from megatron.bridge.training.utils.flop_utils import accumulate_flops_metadata, get_model_chunk_vp_stage
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params
    from megatron.bridge.training.utils.pg_utils import get_pg_collection
    from megatron.core.utils import get_model_config

    config, groups, stage = get_model_config(model), get_pg_collection(model), get_model_chunk_vp_stage(model)
    state.timers("batch-generator", log_level=2).start()
    with state.straggler_timer(bdata=True):
        tokens, labels, mask, attention_mask, position_ids, packed = get_batch(
            data_iterator, state.cfg, bool(config.mtp_num_layers), pg_collection=groups, vp_stage=stage
        )
    state.timers("batch-generator").stop()
    documents, counted = {}, {}
    if packed is not None:
        if getattr(config, "is_hybrid_model", False) and tokens is not None:
            packed["total_tokens"] = tokens.size(1)
        documents["packed_seq_params"] = get_packed_seq_params(packed)
        if groups.cp.size() == 1:
            # Bridge counts the work of packed documents only where they are not cut over ranks
            counted = {"cu_seqlens": documents["packed_seq_params"].cu_seqlens_q}
    accumulate_flops_metadata(
        state, tokens, vp_stage=stage, config_seq_len=getattr(config, "seq_length", None), **counted
    )
    run = model.build_schedule_plan if return_schedule_plan else model
    with state.straggler_timer:
        output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=mask, **documents)
    checks = state.cfg.rerun_state_machine
    return output, partial(
        masked_next_token_loss,
        mask,
        check_for_nan_in_loss=checks.check_for_nan_in_loss,
        check_for_spiky_loss=checks.check_for_spiky_loss,
    )
