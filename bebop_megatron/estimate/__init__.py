"""What a launch needs of each rank's memory, before anything is launched: `python -m bebop_megatron.estimate`.

Parameters are counted, not estimated: every rank's model is built by Megatron itself on the meta device
(`platform/rehearsal.py`). Gradients and optimizer follow from them, exactly but for a distributed optimizer's padding.
Activations are formulas (`activations.py`); so is the objective's peak (`objective.py`), which tests measure.
"""

from bebop_megatron.estimate.report import Estimate, estimate

__all__ = ["Estimate", "estimate"]
