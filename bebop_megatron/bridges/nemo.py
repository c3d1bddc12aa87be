"""Our objective, MTP attention and freeze schedule in `nemo.collections.llm` of NeMo 2 (`nemo_toolkit` 2.7.3).

```python
from bebop_megatron.bridges.nemo import adapt, import_llm, layer_spec, optimizer
llm = import_llm()
config = llm.Qwen3Config8B(transformer_layer_spec=layer_spec, mtp_num_layers=3, mtp_use_repeated_layer=True)
callbacks = adapt(config, ObjectiveConfig(loss="tv"), FreezeConfig(schedule="backbone"), attention="chain")
model = llm.GPTModel(config, optim=optimizer(OptimizerConfig(lr=3.5e-5), config), tokenizer=tokenizer)
```

NeMo 2.7.3 was written for older releases of Megatron-core than the one that this package needs (0.19). What training
meets on the way is replaced here: data step, forward step and optimizer. NeMo 3 has moved its language models to
Megatron Bridge: `bebop_megatron.bridges.megatron_bridge`.
"""

from __future__ import annotations

from typing import Any

from bebop_megatron.config import FreezeConfig, MetricsConfig, ObjectiveConfig
from bebop_megatron.optional import require

NEMO_VERSIONS = ("2.7.3",)


def require_nemo() -> None:
    """See that NeMo is there, in a version that trains language models itself.

    Raises:
        RuntimeError: it is not; says what to install.
    """
    require(
        "nemo.collections.llm",
        "nemo.collections.llm is not installed: pip install 'nemo_toolkit==2.7.3' in an environment of its own "
        "(docs/integration.md). NeMo 3 has none: its language models moved to Megatron Bridge, see "
        "bebop_megatron.bridges.megatron_bridge",
    )


def import_llm() -> Any:
    """`nemo.collections.llm`; imported directly it misses a module that Megatron-core 0.19 no longer has.

    Raises:
        RuntimeError: NeMo is not installed.
    """
    require_nemo()
    from bebop_megatron.mcore import nemo_imports

    return nemo_imports.import_llm()


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The `transformer_layer_spec` of a NeMo config: the decoder's spec; MTP layers attend as `adapt` was told."""
    from bebop_megatron.mcore.mtp_attention import mtp_attention
    from bebop_megatron.mcore.spec import chain, first_depth, per_depth

    specs = {"per-depth": per_depth, "chain": chain, "first-depth": first_depth}
    return specs[mtp_attention(config)](config, vp_stage)


def adapt(
    config: Any,
    objective: ObjectiveConfig,
    freezing: FreezeConfig | None = None,
    *,
    attention: str | None = None,
    metrics: MetricsConfig | None = None,
) -> list[Any]:
    """Have the model of a NeMo GPTConfig trained on our objective; -> callbacks for its trainer.

    Sets the config's data step and forward step. Call it before the model is built.

    Raises:
        RuntimeError: NeMo is not installed.
        ValueError: settings that do not go together; learning rates of the head, which NeMo's schedulers do not know.
    """
    require_nemo()
    from bebop_megatron.mcore import attach, install
    from bebop_megatron.mcore.mtp_attention import set_mtp_attention
    from bebop_megatron.mcore.nemo_loop import data_step, follow_training, forward_step

    install()
    attach(config, objective, vocab_size=config.vocab_size, metrics=metrics)
    if attention is not None or objective.loss is not None:
        set_mtp_attention(config, attention)
    config.data_step_fn, config.forward_step_fn = data_step, forward_step
    return follow_training(config, freezing or FreezeConfig(), objective)


def optimizer(optimizer_config: Any, config: Any, lr_scheduler: Any = None) -> Any:
    """NeMo's `MegatronOptimizerModule` for a config that `adapt` has seen, on this Megatron-core.

    Raises:
        RuntimeError: NeMo is not installed.
    """
    require_nemo()
    from bebop_megatron.mcore.nemo_loop import MTPOptimizerModule

    return MTPOptimizerModule(optimizer_config, config, lr_scheduler)
