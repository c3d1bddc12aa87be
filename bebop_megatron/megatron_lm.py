"""What the patched scripts of a Megatron-LM source tree call (`patches/`): four places, all the work on this side.

Without our flags a patched script behaves as Megatron's own, except on a machine without a CUDA device: there
`--distributed-backend gloo` runs it on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from bebop_megatron.pretrain import embedding_ranks, prepare, start

__all__ = ["arguments", "ranks_with_embedding", "start", "use"]

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def arguments(provider: Provider | None = None) -> Provider:
    """The script's own `extra_args_provider`, if it has one, with our flags behind it."""
    from bebop_megatron.mcore.arguments import add_mtp_arguments

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_mtp_arguments(parser if provider is None else provider(parser))

    return add


def use(args: Any, config: Any) -> Any:
    """Have the model of a GPTModelConfig or HybridModelConfig trained as our flags say; returns the config.

    Raises:
        SystemExit: the flags do not go together; one line says why.
    """
    try:
        prepare(args, config)
    except ValueError as error:
        sys.exit(f"error: {error}")
    return config


def ranks_with_embedding(args: Any, config: Any) -> Callable[[list[int]], list[int]] | None:
    """The `get_embedding_ranks` of `pretrain`: pipeline ranks that hold a copy of the word embedding.

    None without `--mtp-loss`: Megatron's own choice.
    """
    if args.mtp_loss is None:
        return None
    tied = config.share_embeddings_and_output_weights
    return lambda ranks: embedding_ranks(config.transformer, ranks, tied)
