"""Acceptance measured by decoding: verification rules, speculative decoder, results."""

from bebop_megatron.evaluation.decode import SpeculativeDecoder
from bebop_megatron.evaluation.expected import ExpectedAcceptance, expected_acceptance
from bebop_megatron.evaluation.filters import filtered_probs
from bebop_megatron.evaluation.outcome import Continuation, DraftRecords, GenerationResult
from bebop_megatron.evaluation.settings import DecodeConfig
from bebop_megatron.evaluation.verify import RULES, Verification, verify

__all__ = [
    "RULES",
    "Continuation",
    "DecodeConfig",
    "DraftRecords",
    "ExpectedAcceptance",
    "GenerationResult",
    "SpeculativeDecoder",
    "Verification",
    "expected_acceptance",
    "filtered_probs",
    "verify",
]
