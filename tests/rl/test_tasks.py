"""Tasks of reinforcement learning.

Catches: a written-out solution that its own reward rejects, a reward for a wrong, missing or disguised number, problems
that change between two readings of one seed, difficulties that are not what they say, slips that are not judged wrong,
texts without freedom of wording, a tokenizer that merges digits, and errors that name neither file nor line.
"""

from __future__ import annotations

import json
import pickle
import re
from itertools import islice

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bebop_megatron.rl.corpus import main as write
from bebop_megatron.rl.task import Problem
from bebop_megatron.rl.tasks import make_task
from bebop_megatron.rl.tasks.answers import equals, final_number
from bebop_megatron.rl.tasks.arithmetic import Arithmetic
from bebop_megatron.rl.tasks.gsm8k import GSM8K

VALUES = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def value(prompt: str) -> int:
    """The answer, from the question alone."""
    a, sign, b = re.fullmatch(r"(\d+)([-+*])(\d+)=\?\n", prompt).groups()
    return VALUES[sign](int(a), int(b))


def test_written_solutions_are_right_and_judged_so():
    task = Arithmetic("1-4")
    for prompt, completion in islice(task.documents(3), 800):
        problem = Problem(prompt, str(value(prompt)))
        assert task.reward(problem, completion) == 1, (prompt, completion)
        assert task.reward(Problem(prompt, str(value(prompt) + 1)), completion) == 0
        # every step that is written is true, not only the last number
        for step in re.finditer(r"(?<!\d)(\d+(?:[-+*]\d+)+)(?:=| is | gives | makes )(\d+)", completion):
            assert eval(step[1]) == int(step[2]), (prompt, completion, step[0])


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4])
def test_problems_are_fixed_by_the_seed_and_of_their_difficulty(difficulty):
    task = make_task(f"arithmetic:difficulty={difficulty}")
    first, again, other = (list(islice(task.problems(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [problem.answer for problem in first] == [str(value(problem.prompt)) for problem in first]
    sign, lowest = {1: ("+", 10), 2: ("+", 100), 3: ("-", 100), 4: ("*", 12)}[difficulty]
    for problem in first:
        a = re.match(rf"(\d+)\{sign}\d+=", problem.prompt)
        assert a, problem
        assert lowest <= int(a[1]) < 10 ** len(str(lowest))
        assert int(problem.answer) >= 0
    assert pickle.loads(pickle.dumps(task)) == task


def test_a_range_mixes_its_difficulties_and_others_are_refused():
    signs = {re.search(r"[-+*]", problem.prompt)[0] for problem in islice(Arithmetic("1-4").problems(0), 100)}
    assert signs == {"+", "-", "*"}
    for wrong in (0, 5, "3-1", "1-9", "easy"):
        with pytest.raises(ValueError, match="difficulty is a number from 1 to 4"):
            Arithmetic(wrong)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Arithmetic().codec(None)


def test_slips_cost_the_reward_at_the_rate_they_are_made():
    task = Arithmetic(2)
    rate = {}
    for slips in (0.0, 0.1, 0.3):
        found = islice(task.documents(0, slips), 1500)
        rewards = [task.reward(Problem(prompt, str(value(prompt))), completion) for prompt, completion in found]
        rate[slips] = sum(rewards) / len(rewards)
    assert rate[0.0] == 1
    # three columns, each right with probability 1 - slips
    assert rate[0.1] == pytest.approx(0.9**3, abs=0.04)
    assert rate[0.3] == pytest.approx(0.7**3, abs=0.05)
    with pytest.raises(ValueError, match="slips is the share"):
        next(task.documents(0, 2.0))


def test_wording_is_free():
    solutions = {completion for prompt, completion in islice(Arithmetic(1).documents(5), 300)}
    worded = {re.sub(r"\d+", "N", text) for text in solutions}
    assert len(worded) > 250


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so\n#### 12", 12),
        ("#### 7\n#### 12\n", 12),
        ("#### 1,234", 1234),
        ("#### $-3.50", -3.5),
        ("#### 12.", 12),
        ("so 12", None),
        ("#### ", None),
        ("#### 12 or 13", None),
        ("#### 12\n####", None),
        ("#### twelve", None),
        ("#### 1.2.3", None),
        ("", None),
    ],
)
def test_the_number_behind_the_last_mark_counts(text, number):
    assert final_number(text) == number
    assert equals(text, str(number)) if number is not None else not equals(text, "12")


@pytest.fixture
def questions(tmp_path):
    records = [
        {"question": "What is 2 and 3?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
        {"question": "A hundred twenties?", "answer": "100*20\n#### 2,000"},
        {"question": "Half of 1?", "answer": "#### 0.5"},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return file


def test_gsm8k_reads_questions_and_judges_answers(questions):
    task = make_task(f"gsm8k:path={questions}")
    problems = list(islice(task.problems(4), 6))
    assert sorted(problems[:3], key=str) == sorted(problems[3:], key=str)
    assert problems == list(islice(task.problems(4), 6))
    by_answer = {problem.answer: problem for problem in problems}
    assert by_answer.keys() == {"5", "2000", "0.5"}
    assert by_answer["5"].prompt == "Question: What is 2 and 3?\nAnswer:"
    assert task.reward(by_answer["2000"], " many\n#### 2000.0") == 1
    assert task.reward(by_answer["2000"], " many\n#### 200") == 0
    assert task.reward(by_answer["5"], "5") == 0
    for prompt, completion in task.documents(0):
        assert task.reward(next(p for p in problems if p.prompt == prompt), completion) == 1
    assert pickle.loads(pickle.dumps(task)) == task


def test_gsm8k_names_what_is_wrong_with_its_file(tmp_path):
    file = tmp_path / "bad.jsonl"
    cases = {
        "not json\n": "line 1 is not JSON",
        '{"question": "q"}\n': 'line 1: expected "question" and "answer"',
        '{"question": "q", "answer": "#### 1"}\n{"question": "", "answer": "one"}\n': "line 2: the answer does not end",
        "\n": "holds no questions",
    }
    for number, (text, message) in enumerate(cases.items()):
        each = tmp_path / f"{number}.jsonl"
        each.write_text(text)
        with pytest.raises(ValueError, match=message):
            GSM8K(str(each))
    with pytest.raises(ValueError, match=r"gsm8k:path=.* is no file"):
        GSM8K(str(file))
    with pytest.raises(ValueError, match="needs its text"):
        GSM8K()


def test_corpus_is_what_the_backbone_is_trained_on(tmp_path, capsys):
    folder = tmp_path / "corpus"
    options = ["--task", "arithmetic:difficulty=1", "--documents", "400", "--slips", "0.2", "--vocab-size", "300"]
    assert write([*options, "--pad-to", "72", "--output", str(folder)]) == 0
    for name in ("corpus.bin", "corpus.idx", "corpus-holdout.jsonl", "tokenizer/tokenizer.json"):
        assert (folder / name).is_file(), name
    records = [json.loads(line) for line in (folder / "documents.jsonl").read_text().splitlines()]
    codec = Arithmetic(1).codec(str(folder / "tokenizer"))
    for record in records[:50]:
        tokens = codec.encode(record["completion"])
        assert codec.decode(tokens) == record["completion"]
        # digits stay single, so that a number is computed and not looked up
        assert all(sum(map(str.isdigit, codec.decode([token]))) <= 1 for token in tokens)
        assert len(tokens) < len(record["completion"])
    # at this sequence length every sample is a document, and begins with its prompt
    data = IndexedDataset(str(folder / "corpus"))
    masks = IndexedDataset(str(folder / "corpus_mask"))
    assert set(data.sequence_lengths) == {72}
    end = codec.stop_tokens[0]
    for tokens, mask in ((list(data[index]), list(masks[index])) for index in range(20)):
        prompt, _, _ = codec.decode(tokens[: tokens.index(end)]).partition("\n")
        assert re.fullmatch(r"\d+\+\d+=\?", prompt)
        # targets are the completion and its end
        targets = [place for place, is_target in enumerate(mask) if is_target]
        assert targets == list(range(len(codec.encode(prompt + "\n")), tokens.index(end) + 1))
    assert write([*options, "--pad-to", "20", "--output", str(tmp_path / "short")]) == 2
    assert "more than the 20 that every document is padded to" in capsys.readouterr().err
    assert write(["--task", "letters", "--output", str(folder)]) == 2
    assert "letters has no texts" in capsys.readouterr().err
