"""Pre-RL adaptation of a Qwen model's MTP head with Megatron Bridge.

    torchrun --nproc-per-node 8 examples/bridge_adapt.py qwen3_5 hf=Qwen/Qwen3.5-35B-A3B \
      checkpoint.pretrained_checkpoint=CKPT checkpoint.save=ADAPTED checkpoint.load=ADAPTED dataset.data_path=DATA

The first word is a recipe (qwen3, qwen3_next, qwen3_5) or a YAML file of your own, every other one a setting of it.
CKPT is a checkpoint with MTP weights: `python -m bebop_megatron.convert import --model gpt` makes one. `--cpu`
rehearses a tiny model without a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

from bebop_megatron.bridges import recipes


def changes(settings: list[str]) -> dict[str, Any]:
    """Settings such as `train.train_iters=500` by section."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        section, dot, field = name.partition(".")
        if not equals:
            sys.exit(f"error: {setting!r}: expected section.field=value, for example train.train_iters=500")
        if dot:
            found.setdefault(section, {})[field] = recipes.parse(value)
        else:
            found[section] = recipes.parse(value)
    return found


def main(recipe: str, settings: list[str], cpu: bool) -> None:
    """Train as a recipe says."""
    if cpu:
        from bebop_megatron.platform.bridge import enter_bridge, use_cpu

        enter_bridge()
    path = recipe if recipe.endswith((".yaml", ".yml")) else recipes.FOLDER / f"{recipe}.yaml"
    try:
        ready = recipes.load(path, **changes(settings))
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    if cpu:
        use_cpu(ready.container)
    from megatron.bridge.training.pretrain import pretrain

    pretrain(ready.container, ready.forward_step, callbacks=ready.callbacks)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--cpu"]
    if not words:
        sys.exit(__doc__)
    main(words[0], words[1:], cpu="--cpu" in sys.argv)
