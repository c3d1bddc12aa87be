"""Asynchronous GRPO: rollout workers decode speculatively while a Megatron learner trains."""
