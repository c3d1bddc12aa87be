"""Multi-token-prediction heads for speculative decoding, trained inside Megatron.

The public modules. `make docs` writes the reference of what they hold; everything else may change in any release.

- `bebop_megatron.losses`: the objectives, over sharded logits or fused with the LM head
- `bebop_megatron.losses.reference`: the same as dense float64 formulas, the specification
- `bebop_megatron.losses.prefix`: which anchors count; the end-to-end product and its weights
- `bebop_megatron.alignment`: who is the target of whom, in packed and context-parallel batches too
- `bebop_megatron.reduction`: one normalisation over micro-batches and ranks
- `bebop_megatron.metrics`: acceptance as sums and counts
- `bebop_megatron.entropy`: acceptance against the target's entropy
- `bebop_megatron.config`: every setting, each of them a flag
- `bebop_megatron.schedule.phases`: the freeze schedule as a function of the iteration
- `bebop_megatron.mcore`: `install()` and `attach()` for a Megatron training loop of your own
- `bebop_megatron.mcore.spec`: layer specs for the MTP block
- `bebop_megatron.mcore.presets`: config fields of the Qwen families
- `bebop_megatron.evaluation`: verification rules, the speculative decoder, acceptance from a full forward pass
- `bebop_megatron.evaluation.agreement`: a decoder's records against a full forward pass
- `bebop_megatron.data`: data sets with a loss mask
- `bebop_megatron.convert`: Hugging Face folders to Megatron checkpoints and back
- `bebop_megatron.estimate`: the memory of each rank of a launch
- `bebop_megatron.rl.task`: what a task of reinforcement learning has to be
- `bebop_megatron.rl.config`: every setting of a reinforcement-learning run
- `bebop_megatron.megatron_lm`: what a patched script of Megatron-LM calls
- `bebop_megatron.platform`: Megatron on CPU and gloo
"""
