"""Objectives for draft heads: mathematics only, torch only."""

from bebop_megatron.losses.chunked import fused_linear_objective
from bebop_megatron.losses.objectives import ObjectiveOutput, vocab_parallel_objective
from bebop_megatron.losses.registry import OBJECTIVES, Objective
from bebop_megatron.losses.shard import VocabShard
from bebop_megatron.losses.statistics import RowStats

__all__ = [
    "OBJECTIVES",
    "Objective",
    "ObjectiveOutput",
    "RowStats",
    "VocabShard",
    "fused_linear_objective",
    "vocab_parallel_objective",
]
