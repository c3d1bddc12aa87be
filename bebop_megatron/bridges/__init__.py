"""Other people's formats and trainers: Hugging Face weights, Megatron Bridge, NeMo."""
