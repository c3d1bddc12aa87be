"""A Hugging Face tokenizer as the tokens of a task."""

from __future__ import annotations

from bebop_megatron.data.tokenizer import load_tokenizer


class TokenizerCodec:
    """Text to tokens with the tokenizer at `path`; its end-of-sequence token ends a completion.

    Raises:
        ValueError: no tokenizer there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._tokenizer = load_tokenizer(path)
        self.vocab_size = len(self._tokenizer)
        self.stop_tokens = (self._tokenizer.eos_token_id,)

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, tokens: list[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
