"""The arguments a checkpoint was trained with, also where Megatron Bridge wrote it, which has a file of its own."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import yaml

# Bridge's file beside the tensors, in each iteration's folder
RUN_CONFIG = "run_config.yaml"


def saved_arguments(reader: Any) -> Any:
    """Megatron's arguments of a `torch_dist` checkpoint; None if it holds none.

    A checkpoint of Megatron Bridge holds its model config instead, whose fields are turned into arguments.
    """
    args = reader.common().get("args")
    path = reader.folder / RUN_CONFIG
    if args is not None or not path.is_file():
        return args
    model = yaml.safe_load(path.read_text()).get("model") or {}
    # a model config holds the fields of the architecture apart
    model = {**model, **(model.get("transformer") or {})}
    names = {
        "num_experts": model.get("num_moe_experts"),
        "num_query_groups": model.get("num_query_groups") or model.get("num_attention_heads"),
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": not model.get("share_embeddings_and_output_weights", False),
        "max_position_embeddings": model.get("seq_length"),
    }
    return Namespace(**{**model, **names})
