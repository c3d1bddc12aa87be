"""Pre-RL adaptation of the Qwen families in Megatron Bridge, as YAML files and as the functions that read them.

```python
from bebop_megatron.bridges import recipes
recipe = recipes.qwen3_5(dataset={"blend": (["data/train"], None)}, checkpoint={"pretrained_checkpoint": CKPT})
pretrain(recipe.container, recipe.forward_step, callbacks=recipe.callbacks)
```

Every section of a file is a section of Bridge's ConfigContainer, but `objective`, `freezing` and `metrics`, which are
the fields of our own config classes. A function takes the same sections and changes only the fields it is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bebop_megatron.bridges.megatron_bridge import adapt, forward_step, require_bridge
from bebop_megatron.config import FreezeConfig, MetricsConfig, ObjectiveConfig

FOLDER = Path(__file__).parent
_OURS: dict[str, Callable[..., Any]] = {
    "objective": ObjectiveConfig,
    "freezing": FreezeConfig,
    "metrics": MetricsConfig,
}
_CONTAINER = (
    *("model", "train", "validation", "optimizer", "scheduler", "ddp", "dataset"),
    *("checkpoint", "logger", "tokenizer", "rng", "dist"),
)
_PLAIN = ("family", "hf", "attention", "mixed_precision")
# the nested text config of a multimodal checkpoint does not name the class that Bridge looks for
_ARCHITECTURES = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}


@dataclass(frozen=True)
class Recipe:
    """What `pretrain` of Megatron Bridge is called with."""

    container: Any
    callbacks: list[Any]
    forward_step: Callable[..., Any] = forward_step


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-5 is a number, as everybody writes learning rates."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str) -> Any:
    """A value as the recipes write it."""
    return yaml.load(text, _Loader)


def read(path: str | os.PathLike[str], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a recipe file with `changes` laid over it, and check what can be checked without Megatron Bridge.

    Raises:
        ValueError: an unknown section, or settings that our own config classes refuse.
    """
    settings = parse(Path(path).read_text())
    for name, change in (changes or {}).items():
        known = settings.get(name)
        settings[name] = {**(known or {}), **change} if isinstance(change, Mapping) else change
    known = {*_OURS, *_CONTAINER, *_PLAIN}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(f"{path}: unknown section {unknown[0]!r}: choose one of {', '.join(sorted(known))}")
    for name, config in _OURS.items():
        _apply(name, config, settings.get(name) or {})
    return settings


def _apply(section: str, config: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    try:
        return config(**fields)
    except TypeError as error:
        raise ValueError(f"section {section!r}: {error}") from None


def _set(section: str, target: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if not hasattr(target, name):
            raise ValueError(f"section {section!r}: {type(target).__name__} has no field {name!r}")
        setattr(target, name, value)


def _provider(hf: str) -> Any:
    """Bridge's provider for a Hugging Face model: a folder, or a name on the hub; no weights are read."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(hf)
    text = getattr(config, "text_config", config)
    if not text.architectures:
        text.architectures = [_ARCHITECTURES[text.model_type]]
    return AutoBridge.from_hf_config(text).to_megatron_provider(load_weights=False)


def _container(settings: Mapping[str, Any]) -> Any:
    from megatron.bridge.training import config as bridge

    sections = {
        "model": _provider(settings["hf"]),
        "train": bridge.TrainingConfig(),
        "validation": bridge.ValidationConfig(),
        "optimizer": bridge.OptimizerConfig(optimizer="adam"),
        "scheduler": bridge.SchedulerConfig(),
        "ddp": bridge.DistributedDataParallelConfig(),
        # without data: random tokens
        "dataset": bridge.GPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=0,
            dataloader_type="single",
        ),
        "checkpoint": bridge.CheckpointConfig(),
        "logger": bridge.LoggerConfig(),
        "tokenizer": bridge.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=settings["hf"]),
        "rng": bridge.RNGConfig(),
        "dist": bridge.DistributedInitConfig(),
    }
    for name, section in sections.items():
        _set(name, section, settings.get(name) or {})
    return bridge.ConfigContainer(**sections, mixed_precision=settings.get("mixed_precision"))


def load(path: str | os.PathLike[str], **changes: Any) -> Recipe:
    """A recipe from a YAML file, each section changed as given.

    Raises:
        RuntimeError: Megatron Bridge is not installed.
        ValueError: an unknown section or field, a model of another family, settings that do not go together.
    """
    settings = read(path, changes)
    require_bridge()
    from bebop_megatron.mcore.presets import require_preset

    container = _container(settings)
    require_preset(container.model, settings["family"])
    callbacks = adapt(
        container,
        ObjectiveConfig(**settings["objective"]),
        FreezeConfig(**settings.get("freezing") or {}),
        attention=settings.get("attention"),
        metrics=MetricsConfig(**settings.get("metrics") or {}),
    )
    return Recipe(container, callbacks)


def qwen3(**changes: Any) -> Recipe:
    """Qwen3, dense or MoE: `qwen3(hf="Qwen/Qwen3-8B", train={"train_iters": 500})`."""
    return load(FOLDER / "qwen3.yaml", **changes)


def qwen3_next(**changes: Any) -> Recipe:
    """Qwen3-Next."""
    return load(FOLDER / "qwen3_next.yaml", **changes)


def qwen3_5(**changes: Any) -> Recipe:
    """The text model of Qwen3.5, dense or MoE."""
    return load(FOLDER / "qwen3_5.yaml", **changes)
