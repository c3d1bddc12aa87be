"""`MaskedGPTDataset` under Megatron's own builder.

Catches: a mask shifted once too often or not at all, a mask of other samples than the tokens', Megatron's cached
loss mask overwritten by one sample for all that follow, prompts trained on because a file was not copied, samples
of old data because Megatron's cache goes by path.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer

from bebop_megatron.data import MaskedGPTDataset
from bebop_megatron.data.build import build
from bebop_megatron.data.documents import Completion, Text, read_documents

SEQUENCE = 256


@pytest.fixture
def megatron_tokenizer(tokenizer_folder):
    return MegatronTokenizer.from_pretrained(tokenizer_path=tokenizer_folder, metadata_path={"library": "huggingface"})


@pytest.fixture
def datasets(tmp_path, megatron_tokenizer):
    """Builds train, validation and test with Megatron's builder."""

    def make(kind, prefixes, *, split="1,0,0", sizes=(40, 0, 0), cache=tmp_path / "cache", **options):
        settings = {
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            **options,
        }
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=SEQUENCE,
            **({"blend": (list(map(str, prefixes)), None), "split": split} if split else {}),
            path_to_cache=str(cache),
            tokenizer=megatron_tokenizer,
            **settings,
        )
        return BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, config).build()

    return make


@pytest.fixture
def chat_prefix(tmp_path, tokenizer, write_jsonl, chats):
    prefix = str(tmp_path / "chats")
    build(read_documents([write_jsonl(chats)]), tokenizer, prefix)
    return prefix


def assert_same(sample, other):
    assert sample.keys() == other.keys()
    for key, value in sample.items():
        assert torch.equal(value, other[key]), key


def is_assistant(label_text):
    """By the text alone: the conversations' assistant words are in capitals, nothing else is."""
    return any(character.isupper() for character in label_text)


@pytest.mark.parametrize("add_extra_token_to_sequence", [True, False])
def test_loss_mask_is_true_exactly_where_the_label_is_the_assistants(
    datasets, chat_prefix, tokenizer, add_extra_token_to_sequence
):
    train, _, _ = datasets(MaskedGPTDataset, [chat_prefix], add_extra_token_to_sequence=add_extra_token_to_sequence)
    assert isinstance(train, MaskedGPTDataset)
    eos = tokenizer.eos_token_id
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    several_documents = 0
    for sample in train:
        tokens, labels, loss_mask = sample["tokens"], sample["labels"], sample["loss_mask"]
        assert loss_mask.dtype == torch.float32
        assert torch.equal(labels[:-1], tokens[1:])
        several_documents += int((tokens == eos).sum() > 1)
        # the role that speaks, from the tokens alone; unknown until the sample shows a turn's start
        role = header = None
        sequence = [*tokens.tolist(), labels[-1].item()] if add_extra_token_to_sequence else tokens.tolist()
        for position, token in enumerate(sequence):
            expected = role == "assistant"
            if position and role is not None:
                assert loss_mask[position - 1].item() == expected, tokenizer.decode(sequence[:position])
            if token == start:
                role, header = "header", []
            elif role == "header":
                header.append(token)
                text = tokenizer.decode(header)
                if text.endswith("\n"):
                    role = text.strip()
            elif token == end:
                role = "between"
        if not add_extra_token_to_sequence:
            assert loss_mask[-1] == 0
    assert several_documents > 5


def test_targets_decode_to_the_answers(datasets, chat_prefix, tokenizer):
    train, _, _ = datasets(MaskedGPTDataset, [chat_prefix])
    kept = [tokenizer.decode(sample["labels"][sample["loss_mask"].bool()]) for sample in train]
    left = [tokenizer.decode(sample["labels"][~sample["loss_mask"].bool()]) for sample in train]
    assert all(text.replace("<|im_end|>", "").upper() == text.replace("<|im_end|>", "") for text in kept)
    assert not any(is_assistant(text) for text in left)
    assert any("ANSWER" in text for text in kept)


def test_without_a_mask_it_is_the_stock_dataset(datasets, tmp_path, tokenizer):
    prefix = tmp_path / "texts"
    build([Text(f"text number {i}\n" * (1 + i % 9), "here") for i in range(200)], tokenizer, str(prefix))
    options = {"split": "8,1,1", "sizes": (60, 5, 5)}
    for eod_mask_loss in (False, True):
        ours = datasets(MaskedGPTDataset, [prefix], eod_mask_loss=eod_mask_loss, **options)
        stock = datasets(GPTDataset, [prefix], eod_mask_loss=eod_mask_loss, **options)
        for one, other in zip(ours, stock, strict=True):
            assert len(one) == len(other) > 0
            for i in range(len(one)):
                assert_same(one[i], other[i])
        assert_same(ours[0][None], stock[0][None])


def test_with_a_mask_only_the_loss_mask_differs_from_the_stock_dataset(datasets, chat_prefix):
    ours, stock = (datasets(kind, [chat_prefix])[0] for kind in (MaskedGPTDataset, GPTDataset))
    assert len(ours) == len(stock)
    for i in range(len(ours)):
        one, other = ours[i], stock[i]
        assert 0 < one["loss_mask"].sum() < other["loss_mask"].sum()
        assert_same({**one, "loss_mask": 0 * one["loss_mask"]}, {**other, "loss_mask": 0 * other["loss_mask"]})


def test_samples_do_not_depend_on_those_drawn_before(datasets, chat_prefix):
    forwards, backwards = (datasets(MaskedGPTDataset, [chat_prefix])[0] for _ in range(2))
    samples = [backwards[i] for i in reversed(range(len(backwards)))][::-1]
    for i, sample in enumerate(samples):
        assert_same(forwards[i], sample)


def test_the_masks_of_megatron_still_apply(datasets, tmp_path, tokenizer):
    prefix = tmp_path / "a"
    build([Completion(f"{i}?", f" yes {i}", "here") for i in range(200)], tokenizer, str(prefix))
    plain, masked = (
        datasets(MaskedGPTDataset, [prefix], eod_mask_loss=eod_mask_loss)[0] for eod_mask_loss in (False, True)
    )
    for i in range(len(plain)):
        # Megatron masks where the *token* is the end of the document: the prompt's first label, masked here too
        assert torch.equal(plain[i]["loss_mask"], masked[i]["loss_mask"])
        assert plain[i]["loss_mask"][plain[i]["tokens"] == tokenizer.eos_token_id].sum() == 0
        assert plain[i]["loss_mask"][plain[i]["labels"] == tokenizer.eos_token_id].all()


def test_padding_of_the_last_validation_sample_is_masked(datasets, chat_prefix):
    _, valid, _ = datasets(
        MaskedGPTDataset,
        [chat_prefix],
        split="0,1,0",
        sizes=(0, None, 0),
        drop_last_partial_validation_sequence=False,
    )
    padded = [sample for sample in valid if (sample["labels"] == 0).sum() > 10]
    assert len(padded) == 1
    length = int((padded[0]["labels"] != 0).nonzero().max()) + 1
    assert padded[0]["loss_mask"][length:].sum() == 0
    assert padded[0]["loss_mask"][:length].sum() > 0


def test_the_empty_batch_has_no_targets(datasets, chat_prefix):
    train, _, _ = datasets(MaskedGPTDataset, [chat_prefix])
    assert train[None]["loss_mask"].sum() == 0


def test_a_blend_of_data_with_and_without_mask(datasets, chat_prefix, tmp_path, tokenizer):
    texts = tmp_path / "texts"
    build([Text(f"text number {i}\n", "here") for i in range(200)], tokenizer, str(texts))
    train, _, _ = datasets(MaskedGPTDataset, [chat_prefix, texts])
    shares = {sample["loss_mask"].mean().item() == 1 for sample in train}
    assert shares == {True, False}


def test_separate_data_for_every_split(datasets, chat_prefix, tmp_path, tokenizer):
    build([Completion(f"{i}?", f" yes {i}", "here") for i in range(200)], tokenizer, str(tmp_path / "valid"))
    per_split = [([chat_prefix], None), ([str(tmp_path / "valid")], None), None]
    train, valid, test = datasets(MaskedGPTDataset, [], split=None, sizes=(20, 5, 0), blend_per_split=per_split)
    assert test is None
    targets = [
        "".join(tokenizer.decode(sample["labels"][sample["loss_mask"].bool()]) for sample in data)
        for data in (train, valid)
    ]
    assert "ANSWER" in targets[0]
    assert "yes" not in targets[0]
    assert "yes" in targets[1]
    assert "?" not in targets[1]


def test_deferred_indices_and_workers(datasets, chat_prefix):
    eager, _, _ = datasets(MaskedGPTDataset, [chat_prefix])
    # as a worker process receives it
    copied = pickle.loads(pickle.dumps(eager))
    for i in range(len(eager)):
        assert_same(eager[i], copied[i])
    deferred, _, _ = datasets(MaskedGPTDataset, [chat_prefix], defer_npy_index_mmap=True)
    for i in range(len(eager)):
        assert_same(eager[i], deferred[i])


def test_data_built_anew_is_not_read_in_the_order_of_the_old(datasets, chat_prefix, tmp_path, tokenizer):
    datasets(MaskedGPTDataset, [chat_prefix])
    documents = [Completion("x?" * i, f" yes {i}", "here") for i in range(1, 60)]
    build(documents, tokenizer, chat_prefix, overwrite=True)
    again = datasets(MaskedGPTDataset, [chat_prefix])[0]
    fresh = datasets(MaskedGPTDataset, [chat_prefix], cache=tmp_path / "another")[0]
    assert len(again) == len(fresh)
    for i in range(len(fresh)):
        assert_same(again[i], fresh[i])


def test_a_mask_of_other_documents_is_refused(datasets, chat_prefix, tmp_path, tokenizer):
    build([Completion("a", "b", "here")] * 12, tokenizer, str(tmp_path / "other"))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"other_mask{suffix}").replace(tmp_path / f"chats_mask{suffix}")
    with pytest.raises(ValueError, match=r"chats_mask holds 12 documents with .* tokens.*build both again"):
        datasets(MaskedGPTDataset, [chat_prefix])


@pytest.mark.parametrize("missing", [[".bin"], [".idx"], [".bin", ".idx"]])
def test_a_mask_that_was_not_copied_is_missed(datasets, chat_prefix, tmp_path, missing):
    for suffix in missing:
        (tmp_path / f"chats_mask{suffix}").unlink()
    with pytest.raises(ValueError, match="prompts would be trained on"):
        datasets(MaskedGPTDataset, [chat_prefix])


def test_data_of_other_tools_needs_no_description(datasets, tmp_path):
    writer = IndexedDatasetBuilder(str(tmp_path / "foreign.bin"))
    for _ in range(50):
        writer.add_document(list(range(10, 60)), [50])
    writer.finalize(str(tmp_path / "foreign.idx"))
    train, _, _ = datasets(MaskedGPTDataset, [tmp_path / "foreign"])
    assert all(sample["loss_mask"].all() for sample in train)


def test_raw_data_beside_it_is_no_description(datasets, tmp_path, tokenizer):
    build([Text(f"text number {i}\n", "here") for i in range(200)], tokenizer, str(tmp_path / "a"))
    for content in ('{"text": "a"}\n{"text": "b"}\n', "[1, 2]", '{"has_mask": true}', '"' + 70_000 * "a" + '"'):
        (tmp_path / "a.json").write_text(content)
        assert datasets(MaskedGPTDataset, [tmp_path / "a"])[0][0]["loss_mask"].all()
