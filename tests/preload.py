"""Imported once by the process that every run and world of the tests is forked from: Megatron, on the CPU."""

import gc
import logging
import os
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}

import torch

torch.set_num_threads(1)
with warnings.catch_warnings():
    # Megatron's import tells at length which optional packages are missing
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from bebop_megatron.platform import enter

    enter()
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.tokenizers.text
    import megatron.training.argument_utils
    import megatron.training.arguments
    import megatron.training.training  # noqa: F401

    import bebop_megatron.evaluation
    import bebop_megatron.mcore.freeze_install
    import bebop_megatron.pretrain  # noqa: F401

    logging.disable(logging.NOTSET)

# garbage collection of the forks need not go through all of Megatron, half a second each time, nor copy its pages
gc.collect()
gc.freeze()
