"""Trains the small byte-level BPE tokenizer that demos and tests use; loads any Hugging Face tokenizer.

What it saves loads offline with `AutoTokenizer` and with Megatron's `--tokenizer-type HuggingFaceTokenizer`.
"""

from __future__ import annotations

import hashlib
import heapq
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bebop_megatron.data.documents import Document

END_OF_TEXT, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, TURN_START, TURN_END)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# the generation block is what the loss mask keeps: an assistant's words and the end of the turn
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# in the order in which they are moved into place
_FILES = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")

_SAMPLE_CHARACTERS = 8_000_000
_PIECE_CHARACTERS = 32_768


def train_tokenizer(
    documents: Iterable[Document], *, vocab_size: int, sample_characters: int = _SAMPLE_CHARACTERS
) -> Any:
    """A byte-level BPE tokenizer with exactly `vocab_size` entries, the special tokens first.

    Trained on at most `sample_characters` characters, chosen by hash: the same documents give the same
    tokenizer, in whatever order they come.

    Raises:
        ValueError: `vocab_size` smaller than bytes and special tokens need, or larger than the text allows.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"--vocab-size must be at least {MIN_VOCAB_SIZE} (256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens), got {vocab_size}"
        )
    sample = _sample(documents, sample_characters)
    if not sample:
        raise ValueError("--input holds no text: a tokenizer needs some to learn from")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # untrimmed offsets: a token's offsets are then the characters that it holds, white space too
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer)
    if backend.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size:,} is more than the input allows: {sum(map(len, sample)):,} "
            f"characters gave {backend.get_vocab_size():,} tokens; pass more text or a smaller size"
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _pieces(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        for text in document.strings():
            yield from (text[i : i + _PIECE_CHARACTERS] for i in range(0, len(text), _PIECE_CHARACTERS))


def _sample(documents: Iterable[Document], characters: int) -> list[str]:
    """The pieces with the smallest hashes that together fit into `characters`; holds no more in memory."""
    heap: list[tuple[int, str]] = []
    size = 0
    for piece in _pieces(documents):
        digest = hashlib.sha256(piece.encode()).digest()
        # heapq keeps the smallest in front: the negated hash puts the first to go there
        heapq.heappush(heap, (-int.from_bytes(digest[:8]), piece))
        size += len(piece)
        while size > characters and len(heap) > 1:
            size -= len(heapq.heappop(heap)[1])
    return [piece for _, piece in sorted(heap, reverse=True)]


def check_output(folder: str, *, overwrite: bool) -> None:
    """Raises ValueError if the folder holds a tokenizer already."""
    existing = [name for name in _FILES if Path(folder, name).exists()]
    if existing and not overwrite:
        raise ValueError(
            f"--output {folder} holds {', '.join(existing)} already; choose another folder, or pass --overwrite"
        )


def save_tokenizer(tokenizer: Any, folder: str) -> None:
    """Write the tokenizer's files, `tokenizer.json` last: nothing loads without it."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=target) as partial:
        # the largest file once by ourselves: of a full disk the library raises a bare Exception
        Path(partial, _FILES[-1]).write_text(tokenizer.backend_tokenizer.to_str(pretty=True), encoding="utf-8")
        tokenizer.save_pretrained(partial)
        for name in reversed(_FILES):
            (target / name).unlink(missing_ok=True)
        for name in _FILES:
            Path(partial, name).replace(target / name)


def load_tokenizer(path: str) -> Any:
    """A Hugging Face tokenizer with an end-of-sequence token.

    Raises:
        ValueError: nothing there that can be loaded, or a tokenizer without the token that ends a document.
    """
    from transformers import AutoTokenizer

    local = Path(path).exists()
    # a name with one slash, or none, may be on the hub
    if not local and path.count("/") > 1:
        raise ValueError(f"--tokenizer {path}: no such folder; `python -m bebop_megatron.data tokenizer` makes one")
    try:
        # absolute: the data's description names the tokenizer, and is read from other folders too
        tokenizer = AutoTokenizer.from_pretrained(str(Path(path).resolve()) if local else path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {path}: no Hugging Face tokenizer could be loaded ({error})") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--tokenizer {path} has no eos_token, which ends every document; set one in its config")
    return tokenizer


def beginning_of_sequence(tokenizer: Any) -> list[int]:
    """What this tokenizer puts in front of a text by itself: the beginning of sequence, or nothing."""
    return [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of what turns text into ids: the fast tokenizer's file, else its vocabulary, and the template."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    content = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else vocabulary
    return hashlib.sha256(f"{content}{tokenizer.chat_template}".encode()).hexdigest()
