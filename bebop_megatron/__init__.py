"""Multi-token-prediction heads for speculative decoding, trained inside Megatron."""
