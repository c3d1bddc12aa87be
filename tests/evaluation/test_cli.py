"""The evaluation command as a user runs it.

Catches: an architecture flag that Megatron forgets to take from the checkpoint, a checkpoint that needs its
training layout or torchrun, a head that was never loaded, errors that come late or without the reason.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from bebop_megatron.evaluation import subject
from bebop_megatron.evaluation.__main__ import main, parser
from bebop_megatron.evaluation.loading import LoadedModel
from bebop_megatron.evaluation.measure import configs_of
from bebop_megatron.evaluation.prompts import read_prompts
from bebop_megatron.evaluation.results import load_rows
from tests.forks import Run, run_module

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")


def run(*arguments: str, processes: int = 0) -> Run:
    return run_module("bebop_megatron.evaluation", *arguments, processes=processes, COLUMNS="200")


@on_cpu
@pytest.mark.dist
def test_two_rules_and_the_baseline_in_table_and_json(checkpoint, prompts, tmp_path):
    output = tmp_path / "deep" / "tv.json"
    done = run(
        *("--load", checkpoint, "--prompts", prompts, "--prompt-tokens", "6", "--max-new-tokens", "20"),
        *("--rule", "rejection", "--rule", "target-only", "--gamma", "3", "--temperature", "0.8"),
        *("--num-tokens", "360", "--batch-size", "4", "--rounds", "2", "--label", "kl", "--output", str(output)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "target-only" in done.stdout
    # Megatron's hundreds of lines stay out of it
    assert len(done.stdout.splitlines()) < 15
    rows = load_rows(output)
    assert [(row.loss, row.rule, row.gamma, row.data) for row in rows] == [
        ("kl", "rejection", 3, "ids"),
        ("kl", "target-only", 3, "ids"),
    ]
    for row in rows:
        assert row.num_tokens == 360
        assert 0 < row.accept_rate < 1
        assert row.accept_length == pytest.approx(1 + 3 * row.accept_rate)
        assert len(row.accept_rate_per_step) == 3
        assert 1 <= row.tokens_per_verification <= row.accept_length
        assert row.tokens_per_second > 0
        assert row.baseline_tokens_per_second > 0
        assert "gpu" not in row.environment
    assert rows[0].baseline_tokens_per_second == rows[1].baseline_tokens_per_second


@on_cpu
@pytest.mark.dist
def test_tensor_parallel_processes_measure_what_one_process_does(checkpoint, prompts, tmp_path):
    common = ["--load", checkpoint, "--prompts", prompts, "--max-new-tokens", "20", "--temperature", "0"]
    common += ["--no-baseline", "--rounds", "1", "--quiet"]
    rates = []
    for processes in (0, 2):
        output = tmp_path / f"{processes}.json"
        done = run(*common, "--output", str(output), processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        assert not done.stdout.strip()
        (row,) = load_rows(output)
        assert row.baseline_tokens_per_second is None
        rates.append((row.accept_rate_per_step, row.num_verifications, row.num_tokens))
    assert rates[0] == rates[1]


@on_cpu
@pytest.mark.dist
def test_loaded_model_is_the_trained_one(checkpoint):
    assert run_module("tests.evaluation.loaded_process", checkpoint).succeeded().strip().endswith("ok")


@on_cpu
@pytest.mark.dist
def test_more_positions_than_the_model_has_are_refused(checkpoint, prompts):
    done = run("--load", checkpoint, "--prompts", prompts, "--max-new-tokens", "60")
    assert done.returncode != 0
    assert "error: a prompt of 12 tokens and max_new_tokens=60" in done.stderr


def failure(*arguments: str) -> str:
    """The one line that the command ends with, run in this process: nothing may have been built yet."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert "RANK" not in os.environ
    assert str(stop.value).startswith("error: ")
    return str(stop.value)


def test_what_is_no_checkpoint_is_refused(prompts, tmp_path):
    assert "has no latest_checkpointed_iteration.txt" in failure("--load", "/nowhere", "--prompts", prompts)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert "iter_0000007 does not exist" in failure("--load", str(tmp_path), "--prompts", prompts)
    (tmp_path / "iter_0000007").mkdir()
    assert "not a torch_dist checkpoint" in failure("--load", str(tmp_path), "--prompts", prompts)


@on_cpu
@pytest.mark.dist
def test_damaged_checkpoint_is_refused_before_anything_is_built(checkpoint, prompts, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "cut")
    largest = max((tmp_path / "cut").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, 5000)
    assert f"{largest.name} has 5,000 bytes of" in failure("--load", str(tmp_path / "cut"), "--prompts", prompts)


def test_checkpoint_without_a_head_is_refused(prompts, tmp_path):
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    save(
        {"decoder.final_layernorm.weight": torch.ones(2)},
        storage_writer=FileSystemWriter(tmp_path / "iter_0000007"),
        no_dist=True,
    )
    assert "has no MTP weights" in failure("--load", str(tmp_path), "--prompts", prompts)


@on_cpu
@pytest.mark.dist
def test_two_copies_of_the_model_finish_what_one_began(checkpoint, prompts, tmp_path):
    (tmp_path / "some.jsonl").write_text("".join(f"{line}\n" for line in Path(prompts).read_text().splitlines()[:3]))
    output = tmp_path / "out" / "completions.jsonl"
    common = ["generate", "--load", checkpoint, "--output", str(output), "--max-new-tokens", "10", "--log-probs"]
    common += ["--samples", "2", "--temperature", "0", "--batch-size", "2"]
    done = run(*common, "--prompts", str(tmp_path / "some.jsonl"))
    assert done.returncode == 0, done.stderr[-3000:]
    begun = output.read_text()
    assert len(begun.splitlines()) == 6
    done = run(*common, "--prompts", prompts, "--tensor-parallel", "1", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "6 completions" in done.stdout
    assert output.read_text().startswith(begun)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    asked = [json.loads(line)["tokens"] for line in Path(prompts).read_text().splitlines()]
    assert [line["prompt_tokens"] for line in lines] == [tokens for tokens in asked for _ in range(2)]
    for first, second in itertools.batched(lines, 2):
        # greedy: whoever continues a prompt says the same
        assert first["completion_tokens"] == second["completion_tokens"]
        assert first["raw_log_probs"] == pytest.approx(second["raw_log_probs"], abs=1e-4)
    wrong = run(*common, "--prompts", prompts, "--tensor-parallel", "2")
    assert "1 process(es) cannot be split into groups of 2" in wrong.stderr


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ('{"text": 1}\n', "x.jsonl", 'line 1 has neither "prompt" or "text"'),
        ('{"tokens": [1]}\n{"tokens": [1,\n', "x.jsonl", "line 2 is not JSON"),
        ('{"tokens": [1, "2"]}\n', "x.jsonl", "line 1 has neither"),
        ("[1, 2]\n", "x.jsonl", "line 1 has neither"),
        ('\n{"text": "a"}\n', "x.jsonl", "line 2 is text: add --tokenizer"),
        ("hello\n", "x.txt", "line 1 is text: add --tokenizer"),
        ("\n \n", "x.txt", "holds no prompts"),
    ],
)
def test_bad_prompts_are_named_by_line(tmp_path, content, name, message):
    (tmp_path / name).write_text(content)
    assert message in failure("--load", "/nowhere", "--prompts", str(tmp_path / name))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gamma", "0"], "--gamma must be at least 1"),
        (["--top-p", "0"], "top_p must lie in"),
        (["--batch-size", "0"], "batch_size must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--num-tokens", "0"], "--num-tokens must be at least 1"),
        (["--prompts", "/nowhere.jsonl"], "no such file"),
        (["--tokenizer", "/no/where"], "no such folder"),
        (["--output", "/proc/x.json"], "--output /proc/x.json cannot be written"),
        (["--output", "/proc"], "is a folder: give a file"),
        (["--report", "/proc/x"], "--report /proc/x cannot be written"),
    ],
)
def test_bad_flags_end_with_one_clear_line(prompts, flags, message):
    assert message in failure("--load", "/nowhere", "--prompts", prompts, *flags)


def test_rules_may_be_repeated_or_listed_and_count_once():
    for flags in (["--rule", "target-only", "rejection"], ["--rule", "target-only", "--rule", "rejection"]):
        options = parser().parse_args(["--load", "x", "--prompts", "y", *flags, "--rule", "rejection"])
        assert [config.rule for config in configs_of(options, ())] == ["target-only", "rejection"]
    (default,) = configs_of(parser().parse_args(["--load", "x", "--prompts", "y"]), (3,))
    assert (default.rule, default.stop_tokens) == ("rejection", (3,))


class _Words:
    """A tokenizer of words by length; `start` goes in front of every text, as some tokenizers do."""

    bos_token_id = 1

    def __init__(self, start: bool) -> None:
        self.start = start

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        start = [1] if self.start and add_special_tokens else []
        return {"input_ids": start + [len(word) if word != "<s>" else 1 for word in text.split()]}

    def __len__(self) -> int:
        return 100


def test_prompts_are_encoded_as_training_data_is(tmp_path):
    path = tmp_path / "x.jsonl"
    records = [{"prompt": "aa bbb", "completion": "c"}, {"text": "<s> aa bbb"}, {"tokens": [7, 8, 9, 10]}, {"text": ""}]
    path.write_text("\n".join(map(json.dumps, records)))
    assert read_prompts(str(path), _Words(start=True)) == [[1, 2, 3], [1, 2, 3], [7, 8, 9, 10]]
    assert read_prompts(str(path), _Words(start=False), 2) == [[2, 3], [1, 2], [7, 8]]
    # one prompt per line, whatever else counts as the end of a line in Unicode
    (tmp_path / "x.txt").write_text("aa bbb\u2028cccc\n\nd\n", encoding="utf-8")
    assert read_prompts(str(tmp_path / "x.txt"), _Words(start=False)) == [[2, 3, 4], [1]]


def test_tokenizer_of_another_size_is_noticed():
    def vocabulary(columns: int, tokenizer: object) -> int:
        return subject.vocabulary(LoadedModel(None, Namespace(vocab_size=95), columns, 16), tokenizer, "t")

    assert vocabulary(112, _Words(False)) == 100
    assert vocabulary(112, None) == 95
    with pytest.raises(ValueError, match="has 100 tokens, but the checkpoint's vocabulary has 96 columns"):
        vocabulary(96, _Words(False))
    with pytest.warns(UserWarning, match="is it the right one"):
        vocabulary(128, _Words(False))
