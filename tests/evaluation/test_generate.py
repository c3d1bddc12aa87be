"""Sampled completions: what is in the file, that it can be trained on, and that a run can be continued.

Catches: a resumed run that repeats or leaves out completions or draws the same random numbers again, half a line that
a crash left behind, a file of other settings that is continued, text that training would read as another prompt, an
end of sequence inside the completion.
"""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch

from bebop_megatron.data.documents import read_documents
from bebop_megatron.data.encode import encode
from bebop_megatron.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from bebop_megatron.evaluation import generate as command
from bebop_megatron.evaluation import loading
from bebop_megatron.evaluation.__main__ import main
from bebop_megatron.evaluation.completions import CompletionFile, Writer
from bebop_megatron.evaluation.outcome import Continuation
from bebop_megatron.evaluation.prompts import Prompt, read_prompt_records
from tests.evaluation import tiny

SIZE = 300
TEXTS = ["def add(a, b):", "import json", "class A:", "return", "# a comment"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, and what a checkpoint looks like from outside."""
    root = tmp_path_factory.mktemp("generate")
    source = root / "source.py"
    source.write_text("def add(a, b):\n    return a + b\n\n\nclass A:\n    # a comment\n    import json\n" * 20)
    save_tokenizer(train_tokenizer(read_documents([str(source)]), vocab_size=SIZE), str(root / "tokenizer"))
    (root / "checkpoint/iter_0000007").mkdir(parents=True)
    (root / "checkpoint/latest_checkpointed_iteration.txt").write_text("7")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return root


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder / "tokenizer"))


@pytest.fixture
def run(megatron, folder, tokenizer, monkeypatch):
    """Run the command on a tiny model; returns the lines of its output."""
    model = tiny.build(vocab_size=len(tokenizer), sharpness=0.15)
    loaded = loading.LoadedModel(model, Namespace(vocab_size=None), len(tokenizer), 1)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: loaded)
    # the world belongs to the fixture
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)

    def generate(output, *flags, prompts="prompts.jsonl", with_tokenizer=True):
        names = ["--load", folder / "checkpoint", "--prompts", folder / prompts, "--output", output]
        names += ["--tokenizer", folder / "tokenizer"] if with_tokenizer else []
        sizes = ["--max-new-tokens", 12, "--batch-size", 2, "--save-every", 4]
        main(["generate", *map(str, [*names, *sizes, *flags])])
        return [json.loads(line) for line in output.read_text().splitlines()]

    return generate


def test_every_prompt_gets_its_samples_with_text_tokens_and_log_probs(run, tmp_path, tokenizer, capsys):
    lines = run(tmp_path / "out.jsonl", "--samples", 3, "--tokens", "--log-probs", "--temperature", 0.8)
    assert [(line["prompt"], line["sample"]) for line in lines] == [(text, i) for text in TEXTS for i in range(3)]
    eos = tokenizer.eos_token_id
    for line in lines:
        tokens = line["completion_tokens"]
        assert tokenizer.decode(line["prompt_tokens"]) == line["prompt"]
        kept = tokens[:-1] if line["finish"] == "stop" else tokens
        assert eos not in kept
        assert tokenizer.decode(kept).rstrip("\ufffd") == line["completion"].rstrip("\ufffd")
        assert line["num_tokens"] == len(tokens) == len(line["log_probs"]) == len(line["raw_log_probs"]) <= 12
        assert line["log_probs"] != line["raw_log_probs"]
    assert len({line["completion"] for line in lines}) > 10
    printed = capsys.readouterr().out
    assert "15 completions" in printed
    for named in ("rule rejection", "gamma 3", "T=0.8", "attention chain", "prompts.jsonl"):
        assert named in printed
    about = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert about["settings"]["checkpoint"].endswith("iter_0000007")
    assert about["about"]["tokens"] == sum(line["num_tokens"] for line in lines)
    assert 1 < about["about"]["accept_length"] < 4


def test_an_interrupted_run_is_continued_to_what_it_would_have_been(run, tmp_path, monkeypatch):
    flags = ["--samples", 2, "--gamma", "adaptive", "--seed", 5]
    whole = run(tmp_path / "whole.jsonl", *flags)
    assert len(whole) == 10
    append, calls = CompletionFile.append, []

    def interrupted(self, records, about):
        append(self, records, about)
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    path = tmp_path / "part.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(CompletionFile, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(path, *flags)
    assert len(path.read_text().splitlines()) == 8
    with path.open("a") as file:
        file.write('{"id": "half a li')
    assert run(path, *flags) == whole
    assert run(path, *flags) == whole
    # other samples of the same prompts, not the same once more
    more = run(path, "--samples", 4, "--seed", 5)
    assert more[:10] == whole
    assert [line["sample"] for line in more[10:]] == [2, 3] * 5
    assert len({line["completion"] for line in more if line["prompt"] == TEXTS[0]}) == 4


def test_a_file_of_other_settings_or_of_another_kind_is_not_continued(run, tmp_path):
    run(tmp_path / "out.jsonl")
    # how tokens are drafted changes no distribution
    run(tmp_path / "out.jsonl", "--gamma", 1, "--rule", "target-only", "--seed", 9)
    for flags, message in ((["--temperature", 0.5], "temperature=1.0, now 0.5"), (["--stop", 7], "stop_tokens=")):
        with pytest.raises(SystemExit, match=message):
            run(tmp_path / "out.jsonl", *flags)
    (tmp_path / "foreign.jsonl").write_text('{"prompt": "a"}\n')
    for settings, message in ((None, "is not: choose"), ("{", "is no JSON"), ("{}", "was not written by this command")):
        if settings is not None:
            (tmp_path / "foreign.jsonl.settings.json").write_text(settings)
        with pytest.raises(SystemExit, match=rf"foreign.jsonl.settings.json {message}"):
            run(tmp_path / "foreign.jsonl")


def test_tokens_in_tokens_out_without_a_tokenizer(run, tmp_path, folder):
    ids = [[5, 6, 7], [9], [5, 6, 7]]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in ids))
    lines = run(tmp_path / "out.jsonl", "--gamma", 0, prompts="ids.jsonl", with_tokenizer=False)
    assert [line["prompt_tokens"] for line in lines] == ids
    # the same prompt twice: two samples of it
    assert [line["sample"] for line in lines] == [0, 0, 1]
    assert all(line["num_tokens"] == 12 and line["finish"] == "length" for line in lines)


def test_completions_are_training_data_as_they_are(run, tmp_path, tokenizer):
    output = tmp_path / "out.jsonl"
    lines = run(output, "--tokens")
    documents = list(encode(read_documents([str(output)]), tokenizer))
    assert len(documents) == len(lines)
    for line, document in zip(lines, documents, strict=True):
        targets = document.tokens[document.mask.astype(bool)].tolist()
        assert document.tokens.tolist()[: len(line["prompt_tokens"])] == line["prompt_tokens"]
        assert tokenizer.decode(targets[:-1]) == line["completion"]
        assert targets[-1] == tokenizer.eos_token_id


def test_conversations_come_back_with_the_answer_as_their_last_message(run, tmp_path, folder, tokenizer):
    from bebop_megatron.mcore.conversations import Conversations

    with_template = load_tokenizer(str(folder / "tokenizer"))
    with_template.chat_template = TEMPLATE
    with_template.save_pretrained(folder / "chatty")
    asked = [
        [{"role": "user", "content": "add"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in asked))
    output = tmp_path / "out.jsonl"
    lines = run(output, "--tokenizer", folder / "chatty", prompts="chats.jsonl", with_tokenizer=False)
    assert len(lines) == 2
    for line, messages in zip(lines, asked, strict=True):
        # an answer that was there is sampled anew
        assert line["messages"][:-1] == [m for m in messages if m["role"] == "user"]
        assert line["messages"][-1]["role"] == "assistant"
    assert Conversations(str(output))[0] == lines[0]["messages"]
    assert len(list(encode(read_documents([str(output)]), with_template))) == 2


def _file(path, **settings):
    return CompletionFile(str(path), {"temperature": 1.0} | settings)


def test_completions_without_text_are_counted_and_not_sampled_again(tmp_path, tokenizer):
    eos = tokenizer.eos_token_id
    prompts = [Prompt([5, 6], "a b"), Prompt([7], "c"), Prompt([5, 6], "a b")]
    writer = Writer(tokenizer, (eos,))
    empty = Continuation(0, [eos], [-1.0], None, "stop")
    output = _file(tmp_path / "out.jsonl")
    assert [(job.prompt, job.sample) for job in output.missing(prompts, 1)] == [(0, 0), (1, 0), (2, 1)]
    output.append([writer.record(prompts[0], 0, empty)], {})
    assert (tmp_path / "out.jsonl").read_text() == ""
    for again in (output, _file(tmp_path / "out.jsonl")):
        assert again.num_done == 1
        assert [(job.prompt, job.sample) for job in again.missing(prompts, 1)] == [(1, 0), (2, 1)]


def test_half_a_character_at_the_end_of_a_cut_text_is_left_out(tokenizer):
    ids = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    writer = Writer(tokenizer, ())
    record = writer.record(Prompt([5], "a"), 0, Continuation(0, [*ids, ids[0]], [0.0] * 3, None, "length"))
    assert record["completion"] == "é"


def test_a_prompt_is_cut_at_a_whole_character(tmp_path, tokenizer):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a\N{SNOWMAN}b"}) + "\n")
    (whole,) = read_prompt_records(str(path), tokenizer)
    assert len(whole.tokens) == 5
    assert [read_prompt_records(str(path), tokenizer, n)[0].text for n in (1, 2, 3, 4)] == [
        "a",
        "a",
        "a",
        "a\N{SNOWMAN}",
    ]


def test_seeds_differ_between_parts_and_runs():
    seeds = {command._seed(seed, done) for seed in range(3) for done in (0, 4, 8)}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gamma", "many"], "a number, adaptive, or adaptive:MOST"),
        (["--samples", 0], "--samples must be at least 1"),
        (["--save-every", 0], "--save-every must be at least 1"),
        (["--stop", "two words"], "only one token can end a text"),
        (["--max-new-tokens", 95], r"need \d+ positions"),
    ],
)
def test_bad_flags_end_with_one_clear_line(run, tmp_path, flags, message):
    with pytest.raises(SystemExit, match=message):
        run(tmp_path / "out.jsonl", *flags)
    assert not (tmp_path / "out.jsonl").exists()
