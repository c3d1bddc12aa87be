"""The checkpoint that the loop starts from is the one that decoding is tested with."""

from tests.evaluation.conftest import checkpoint

__all__ = ["checkpoint"]
