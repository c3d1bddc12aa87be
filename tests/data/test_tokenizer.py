"""The trained tokenizer.

Catches: a vocabulary that is not exactly as large as asked, text that does not survive a round trip, another
tokenizer from the same text, one that Megatron or transformers cannot load without a network.
"""

from __future__ import annotations

from argparse import Namespace

import pytest

from bebop_megatron.data.documents import Text
from bebop_megatron.data.tokenizer import (
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    check_output,
    load_tokenizer,
    save_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from tests.data.conftest import VOCAB_SIZE

TEXTS = [Text(f"def function_{i}(argument):\n    return argument * {i}\n", "here") for i in range(200)]


def test_the_vocabulary_has_exactly_the_size_asked_for(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == VOCAB_SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (tokenizer.eos_token, tokenizer.pad_token) == SPECIAL_TOKENS[:2]


def test_any_text_survives_a_round_trip(tokenizer):
    text = "  def f(x):\n\treturn 'ÄÖÜ 日本 🙂'  # , . !\r\n\n\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_megatron_loads_it(tokenizer, tokenizer_folder):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = Namespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=tokenizer_folder,
        chat_template=None,
        vocab_file=None,
        merge_file=None,
        special_tokens=[],
        tokenizer_hf_no_use_fast=False,
        tokenizer_hf_no_include_special_tokens=False,
        trust_remote_code=False,
        metadata_path=None,
        pad_vocab_size=True,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        rank=0,
    )
    megatron = build_tokenizer(args)
    assert (megatron.vocab_size, args.padded_vocab_size) == (VOCAB_SIZE, 512)
    assert (megatron.eod, megatron.pad) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert megatron.tokenize("return x") == tokenizer("return x")["input_ids"]


def test_the_same_text_gives_the_same_tokenizer_in_any_order():
    one, other = (train_tokenizer(texts, vocab_size=300) for texts in (TEXTS, TEXTS[::-1]))
    assert tokenizer_hash(one) == tokenizer_hash(other)
    other.chat_template = "another"
    assert tokenizer_hash(one) != tokenizer_hash(other)


def test_a_sample_is_bounded_and_does_not_depend_on_the_order():
    # sorted input, as a folder of two languages: its head alone is no sample of it
    texts = [Text(f"{word * 9} {i}", "here") for word in ("begin ", "end ") for i in range(50)]
    size = sum(len(text.text) for text in texts) // 4
    one, other = (train_tokenizer(order, vocab_size=270, sample_characters=size) for order in (texts, texts[::-1]))
    assert tokenizer_hash(one) == tokenizer_hash(other)
    assert {len(one(word)["input_ids"]) < len(word) for word in (" begin", " end")} == {True}
    with pytest.raises(ValueError, match=r": 5\d characters gave"):
        train_tokenizer(TEXTS, vocab_size=300, sample_characters=60)


def test_the_chat_template_marks_what_the_assistant_says(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match=f"at least {MIN_VOCAB_SIZE}"):
        train_tokenizer(TEXTS, vocab_size=MIN_VOCAB_SIZE - 1)
    with pytest.raises(ValueError, match=r"9,000 is more than the input allows: .* gave"):
        train_tokenizer(TEXTS, vocab_size=9000)
    with pytest.raises(ValueError, match="holds no text"):
        train_tokenizer([], vocab_size=300)


def test_a_tokenizer_is_replaced_only_on_request(tmp_path, tokenizer):
    save_tokenizer(tokenizer, str(tmp_path))
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="--overwrite"):
        check_output(str(tmp_path), overwrite=False)
    check_output(str(tmp_path), overwrite=True)
    save_tokenizer(tokenizer, str(tmp_path))
    files = {"chat_template.jinja", "mine.txt", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in tmp_path.iterdir()} == files


def test_what_is_no_tokenizer_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="no such folder"):
        load_tokenizer(str(tmp_path / "missing" / "folder"))
    with pytest.raises(ValueError, match="no Hugging Face tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("moved", range(3))
def test_an_interrupted_save_leaves_nothing_that_loads(tmp_path, tokenizer, interrupt_moves, moved):
    save_tokenizer(tokenizer, str(tmp_path))
    interrupt_moves(moved)
    with pytest.raises(KeyboardInterrupt):
        save_tokenizer(tokenizer, str(tmp_path))
    with pytest.raises(ValueError, match="no Hugging Face tokenizer"):
        load_tokenizer(str(tmp_path))
