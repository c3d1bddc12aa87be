"""Other people's formats: Hugging Face weights."""
