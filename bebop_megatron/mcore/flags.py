"""What our flags say of a run: read here and nowhere else, checked together, and put on the model's config.

`config.py` declares them, `arguments.py` puts them on Megatron's command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.config import AttentionConfig, FreezeConfig, MetricsConfig, ObjectiveConfig
from bebop_megatron.mcore.arguments import config_from_args
from bebop_megatron.mcore.attachment import attach
from bebop_megatron.mcore.freeze_checks import check_freezing
from bebop_megatron.mcore.refusals import check_arguments
from bebop_megatron.mcore.spec import use_mtp_attention


@dataclass(frozen=True)
class Flags:
    """One config for each component."""

    objective: ObjectiveConfig
    attention: AttentionConfig
    freezing: FreezeConfig
    metrics: MetricsConfig

    @classmethod
    def of(cls, args: Any) -> Flags:
        """Those of a parsed command line.

        Raises:
            ValueError: a value that makes no sense.
        """
        configs = (ObjectiveConfig, AttentionConfig, FreezeConfig, MetricsConfig)
        return cls(*(config_from_args(config, args) for config in configs))

    def apply(self, args: Any, config: Any, vocab_size: int, checkpoint: Path | None) -> None:
        """Put objective and attention on a GPTModelConfig or HybridModelConfig; nothing is rebound but the builder.

        `vocab_size` without padding; `checkpoint`: the one that the run starts from.

        Raises:
            ValueError: flags, model and checkpoint do not go together.
        """
        check_arguments(args, config.transformer, checkpoint)
        attach(config.transformer, self.objective, vocab_size=vocab_size, metrics=self.metrics)
        if self.attention.mode is not None or self.objective.loss is not None:
            use_mtp_attention(config, self.attention.mode)
        if self.freezing.by_parts:
            check_freezing(self.freezing, self.objective, args)
