"""The files that a build writes.

Catches: documents lost or reordered, a document on both sides of the holdout, another answer to a held-out prompt
in the training data, files that depend on anything but the input, leftovers of an earlier or interrupted build
that load.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bebop_megatron.data.build import build
from bebop_megatron.data.documents import Chat, Completion, Text, read_documents
from bebop_megatron.data.encode import encode
from bebop_megatron.data.tokenizer import tokenizer_hash

SHARED = Path(os.environ.get("BEBOP_SHARED") or Path(__file__).parents[3] / "shared")
GSM8K = SHARED / "data" / "gsm8k" / "train.jsonl"

TEXTS = [Text(f"text number {i}\n", "here") for i in range(300)]
EXCHANGES = [Completion(f"what is {i % 150}?", f" {i}", "here") for i in range(300)]


def decoded(prefix, tokenizer):
    data = IndexedDataset(str(prefix))
    return [tokenizer.decode(data[i]) for i in range(len(data))]


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_texts_are_written_in_order_without_a_mask(tmp_path, tokenizer):
    summaries = build(TEXTS, tokenizer, str(tmp_path / "a"))
    assert decoded(tmp_path / "a", tokenizer) == [text.text + "<|endoftext|>" for text in TEXTS]
    assert {file.name for file in tmp_path.iterdir()} == {"a.bin", "a.idx", "a.json"}
    data = IndexedDataset(str(tmp_path / "a"))
    assert data.index.dtype == np.uint16
    assert data.document_indices.tolist() == list(range(301))
    assert list(summaries) == [str(tmp_path / "a")]


def test_the_mask_has_the_same_documents(tmp_path, tokenizer):
    build(EXCHANGES, tokenizer, str(tmp_path / "a"))
    tokens, mask = IndexedDataset(str(tmp_path / "a")), IndexedDataset(str(tmp_path / "a_mask"))
    assert mask.index.dtype == np.uint8
    assert mask.document_indices.tolist() == tokens.document_indices.tolist()
    for number, encoded in enumerate(encode(EXCHANGES, tokenizer)):
        assert tokens[number].tolist() == encoded.tokens.tolist()
        assert mask[number].tolist() == encoded.mask.tolist()


def test_the_description_counts_what_is_there(tmp_path, tokenizer):
    build(EXCHANGES, tokenizer, str(tmp_path / "a"), format="jsonl")
    encoded = list(encode(EXCHANGES, tokenizer))
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "documents": 300,
        "tokens": sum(one.tokens.size for one in encoded),
        "target_tokens": sum(int(one.mask.sum()) for one in encoded),
        "vocab_size": len(tokenizer),
        "tokenizer": tokenizer.name_or_path,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "format": "jsonl",
        "has_mask": True,
    }


@pytest.mark.parametrize("documents", [TEXTS, EXCHANGES])
def test_the_same_input_gives_the_same_bytes(tmp_path, tokenizer, documents):
    for name in ("one", "other"):
        build(documents, tokenizer, str(tmp_path / name / "a"), holdout=0.1)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_the_holdout_and_the_training_data_are_disjoint_and_complete(tmp_path, tokenizer):
    build(TEXTS, tokenizer, str(tmp_path / "a"), holdout=0.2)
    train, held = decoded(tmp_path / "a", tokenizer), decoded(tmp_path / "a-holdout", tokenizer)
    assert sorted(train + held) == sorted(text.text + "<|endoftext|>" for text in TEXTS)
    assert 30 < len(held) < 90
    lines = (tmp_path / "a-holdout.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] + "<|endoftext|>" for line in lines] == held


def test_a_held_out_document_stays_held_out_when_others_are_added(tmp_path, tokenizer):
    build(TEXTS[:200], tokenizer, str(tmp_path / "few"), holdout=0.2)
    build(TEXTS[::-1], tokenizer, str(tmp_path / "all"), holdout=0.2)
    assert set(decoded(tmp_path / "few-holdout", tokenizer)) < set(decoded(tmp_path / "all-holdout", tokenizer))


def test_all_answers_to_a_prompt_are_on_the_same_side(tmp_path, tokenizer):
    build(EXCHANGES, tokenizer, str(tmp_path / "a"), holdout=0.2)
    train, held = (
        {text.partition("?")[0] for text in decoded(tmp_path / name, tokenizer)} for name in ("a", "a-holdout")
    )
    assert not train & held
    assert len(train) + len(held) == 150
    assert IndexedDataset.exists(str(tmp_path / "a-holdout_mask"))


def test_all_continuations_of_a_conversation_are_on_the_same_side():
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    one, other = (Chat([*opening, {"role": "assistant", "content": answer}], None, "here") for answer in ("a", "b"))
    assert one.identity() == other.identity()
    greeting = [{"role": "assistant", "content": "how can I help?"}]
    chats = [Chat([*greeting, {"role": "user", "content": str(i)}], None, "here") for i in range(2)]
    assert chats[0].identity() != chats[1].identity()


def test_completions_without_prompts_are_told_apart():
    assert Completion("", "a", "here").identity() != Completion("", "b", "here").identity()


def test_the_holdout_of_chats_is_prompt_and_last_answer(tmp_path, tokenizer, write_jsonl, chats):
    build(read_documents([write_jsonl(chats)]), tokenizer, str(tmp_path / "a"), holdout=0.5)
    held = decoded(tmp_path / "a-holdout", tokenizer)
    records = [json.loads(line) for line in (tmp_path / "a-holdout.jsonl").read_text().splitlines()]
    assert [record["prompt"] + record["completion"] + "\n<|endoftext|>" for record in records] == held
    for record in records:
        assert record["prompt"].endswith("<|im_start|>assistant\n")
        assert record["completion"].isupper() or record["completion"].removesuffix("<|im_end|>").isupper()


def test_the_holdout_can_be_read_again(tmp_path, tokenizer):
    build(EXCHANGES, tokenizer, str(tmp_path / "a"), holdout=0.2)
    build(read_documents([str(tmp_path / "a-holdout.jsonl")]), tokenizer, str(tmp_path / "b"))
    for suffix in (".bin", ".idx", "_mask.bin", "_mask.idx"):
        assert (tmp_path / f"a-holdout{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("holdout", [-0.1, 1.0, float("nan")])
def test_impossible_shares_are_refused(tmp_path, tokenizer, holdout):
    with pytest.raises(ValueError, match="--holdout must be at least 0 and less than 1"):
        build(TEXTS, tokenizer, str(tmp_path / "a"), holdout=holdout)


@pytest.mark.parametrize(
    ("documents", "holdout", "message"),
    [
        ([], 0.0, "no documents"),
        (TEXTS[:3], 1e-9, "none for the holdout"),
        (TEXTS[:3], 1 - 1e-9, "none for training"),
    ],
)
def test_an_empty_side_is_refused_and_nothing_is_written(tmp_path, tokenizer, documents, holdout, message):
    with pytest.raises(ValueError, match=message):
        build(documents, tokenizer, str(tmp_path / "a"), holdout=holdout)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_replaced_only_on_request_and_then_all(tmp_path, tokenizer):
    prefix = str(tmp_path / "a")
    build(EXCHANGES, tokenizer, prefix, holdout=0.2)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"a-holdout.jsonl.* already there.*--overwrite"):
        build(TEXTS, tokenizer, prefix)
    assert contents(tmp_path) == before
    build(TEXTS, tokenizer, prefix, overwrite=True)
    # a mask or a holdout of the old data would be silently wrong
    assert {file.name for file in tmp_path.iterdir()} == {"a.bin", "a.idx", "a.json"}


def test_a_failed_build_leaves_the_old_files_alone(tmp_path, tokenizer):
    prefix = str(tmp_path / "a")
    build(TEXTS, tokenizer, prefix)
    before = contents(tmp_path)

    def interrupted():
        yield from EXCHANGES
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(interrupted(), tokenizer, prefix, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moved", range(11))
def test_a_build_interrupted_while_it_moves_files_does_not_load(tmp_path, tokenizer, interrupt_moves, moved):
    prefix = str(tmp_path / "a")
    build(TEXTS, tokenizer, prefix, holdout=0.2)
    interrupt_moves(moved)
    with pytest.raises(KeyboardInterrupt):
        build(EXCHANGES, tokenizer, prefix, holdout=0.2, overwrite=True)
    assert not IndexedDataset.exists(prefix)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    if IndexedDataset.exists(f"{prefix}-holdout"):
        # only ever whole: with its mask
        assert IndexedDataset.exists(f"{prefix}-holdout_mask")


def test_large_vocabularies_are_stored_in_32_bits(tmp_path, tokenizer):
    tokenizer.add_tokens([f"<extra {i}>" for i in range(70_000)])
    build([Text("<extra 69999>", "here")], tokenizer, str(tmp_path / "a"))
    data = IndexedDataset(str(tmp_path / "a"))
    assert data.index.dtype == np.int32
    assert data[0].tolist() == [len(tokenizer) - 1, tokenizer.eos_token_id]


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs GSM8K at {GSM8K}; set BEBOP_SHARED to the folder of data/gsm8k")
def test_gsm8k(tmp_path, tokenizer):
    documents = list(read_documents([str(GSM8K)], keys={"prompt": "question", "completion": "answer"}, separator="\n"))[
        :500
    ]
    build(documents, tokenizer, str(tmp_path / "a"), holdout=0.1)
    tokens, mask = IndexedDataset(str(tmp_path / "a")), IndexedDataset(str(tmp_path / "a_mask"))
    answers = {document.completion + "<|endoftext|>" for document in documents}
    for number in range(len(tokens)):
        kept = mask[number].astype(bool)
        assert tokenizer.decode(tokens[number][kept]) in answers
        assert tokenizer.decode(tokens[number][~kept]).endswith("\n")


@pytest.mark.parametrize("ending", ["/", "/.", "/.."])
def test_a_prefix_without_a_name_is_refused(tmp_path, tokenizer, ending):
    with pytest.raises(ValueError, match=r"must end with a name.*data$"):
        build(TEXTS, tokenizer, f"{tmp_path / 'sub'}{ending}")
    assert not list(tmp_path.iterdir())


def test_raw_data_of_the_same_name_is_never_replaced(tmp_path, tokenizer):
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text('{"text": "mine"}\n')
    with pytest.raises(ValueError, match=r"a.json is already there, and no earlier build wrote it"):
        build(TEXTS, tokenizer, str(tmp_path / "a"), overwrite=True)
    (tmp_path / "a.json").unlink()
    build(TEXTS, tokenizer, str(tmp_path / "a"))
    build(TEXTS, tokenizer, str(tmp_path / "a"), overwrite=True)
    assert (tmp_path / "a.jsonl").read_text() == '{"text": "mine"}\n'
