"""The study in reinforcement learning: do rollouts stay fast while the policy moves, and what does it cost to ask."""
