"""The command line.

Catches: a traceback where the user can put something right, results on standard error or progress on standard
output, a command that needs Megatron although it does without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bebop_megatron.data.__main__ import main


@pytest.fixture
def exchanges(write_jsonl):
    return write_jsonl({"question": f"what is {i}?", "answer": f"it is {i}"} for i in range(100))


def test_build_and_inspect(tmp_path, tokenizer_folder, exchanges, capsys):
    prefix = str(tmp_path / "sub" / "a")
    keys = ["--keys", "prompt=question,completion=answer", "--separator", r"\n"]
    arguments = ["build", "--input", exchanges, "--tokenizer", tokenizer_folder, "--output", prefix, *keys]
    assert main([*arguments, "--holdout", "0.1"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    description = json.loads((tmp_path / "sub" / "a.json").read_text())
    assert f"{prefix}: {description['documents']} documents, {description['tokens']:,} tokens" in output.err
    assert f"{prefix}-holdout: {100 - description['documents']} documents" in output.err

    assert main(["inspect", prefix, "--document", "0"]) == 0
    shown = capsys.readouterr().out
    assert "⟦what is 0?\n⟧it is 0<|endoftext|>" in shown
    assert f"{description['tokens']:,}" in shown
    assert f"{description['target_tokens']:,}" in shown

    assert main([*arguments, "--holdout", "0.1"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "sub" / "a-holdout.idx").exists()


def test_inspect_shows_data_without_mask_or_description(tmp_path, tokenizer_folder, capsys):
    (tmp_path / "a.txt").write_text("some words " * 100)
    prefix = str(tmp_path / "a")
    assert main(["build", "--input", prefix + ".txt", "--tokenizer", tokenizer_folder, "--output", prefix]) == 0
    (tmp_path / "a.json").unlink()
    assert main(["inspect", prefix]) == 2
    assert "pass --tokenizer" in capsys.readouterr().err
    assert main(["inspect", prefix, "--tokenizer", tokenizer_folder, "--max-tokens", "5"]) == 0
    shown = capsys.readouterr().out
    assert "every token is a target" in shown
    assert shown.endswith("…\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{folder}/missing", "--tokenizer", "{tokenizer}"], "not both there"),
        (["build", "--input", "{folder}/no", "--tokenizer", "{tokenizer}", "--output", "{folder}/a"], "no such file"),
        (["build", "--input", "stdlib", "--tokenizer", "{folder}/no", "--output", "{folder}/a"], "no such folder"),
        (["build", "--input", "stdlib", "--tokenizer", "{tokenizer}", "--output", "{folder}/"], "end with a name"),
        (["tokenizer", "--input", "stdlib", "--max-bytes", "0", "--output", "{folder}/a"], "--max-bytes"),
        (["tokenizer", "--input", "{folder}", "--output", "{folder}/a"], "holds no file"),
        (["tokenizer", "--input", "stdlib", "--vocab-size", "9", "--output", "{folder}/a"], "--vocab-size"),
        (["tokenizer", "--input", "stdlib", "--output", "{tokenizer}"], "--overwrite"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(tmp_path, tokenizer_folder, capsys, arguments, message):
    names = {"folder": str(tmp_path), "tokenizer": tokenizer_folder}
    assert main([argument.format(**names) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("suffix", "size", "message"),
    [(".idx", 5, "is damaged"), (".idx", 40, "it was cut short"), (".bin", 8, "its index says")],
)
def test_a_pair_that_was_cut_short_is_refused(tmp_path, tokenizer_folder, exchanges, capsys, suffix, size, message):
    prefix = str(tmp_path / "a")
    keys = ["--keys", "prompt=question,completion=answer", "--quiet"]
    assert main(["build", "--input", exchanges, "--tokenizer", tokenizer_folder, "--output", prefix, *keys]) == 0
    os.truncate(prefix + suffix, size)
    assert main(["inspect", prefix]) == 2
    assert message in capsys.readouterr().err


def test_inspect_finds_the_tokenizer_from_another_folder(tmp_path, tokenizer, exchanges, capsys, monkeypatch):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    keys = "prompt=question,completion=answer"
    assert main(["build", "--input", exchanges, "--keys", keys, "--tokenizer", "tokenizer", "--output", "a"]) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["inspect", "../a"]) == 0
    assert "⟦what is 0?⟧it is 0" in capsys.readouterr().out


def test_max_bytes_keeps_the_first_documents(tmp_path, tokenizer_folder, exchanges):
    # "what is 0?" and "it is 0": 17 bytes
    options = ["--keys", "prompt=question,completion=answer", "--max-bytes", str(17 * 3 + 16), "--quiet"]
    arguments = ["--tokenizer", tokenizer_folder, "--output", str(tmp_path / "a"), *options]
    assert main(["build", "--input", exchanges, *arguments]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["documents"] == 3


def test_inspect_warns_of_another_tokenizer(tmp_path, tokenizer, tokenizer_folder, exchanges, capsys):
    keys = "prompt=question,completion=answer"
    prefix = str(tmp_path / "a")
    main(["build", "--input", exchanges, "--keys", keys, "--tokenizer", tokenizer_folder, "--output", prefix])
    tokenizer.chat_template = "another"
    tokenizer.save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert main(["inspect", prefix, "--tokenizer", str(tmp_path / "other")]) == 0
    assert "is not the tokenizer that" in capsys.readouterr().err


def test_a_tokenizer_is_trained_without_megatron(tmp_path):
    (tmp_path / "a.py").write_text("def f(x):\n    return x + 1\n" * 20)
    code = (
        "import sys; from bebop_megatron.data.__main__ import main; "
        f"status = main(['tokenizer', '--input', {str(tmp_path / 'a.py')!r}, '--vocab-size', '270', '--output', "
        f"{str(tmp_path / 'tokenizer')!r}]); sys.exit(status or 'megatron' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "270 tokens" in done.stderr


def test_files_of_the_output_are_no_input(tmp_path, tokenizer_folder, exchanges, capsys):
    arguments = ["build", "--tokenizer", tokenizer_folder, "--output", str(tmp_path / "a"), "--holdout", "0.2"]
    keys = ["--keys", "prompt=question,completion=answer"]
    assert main([*arguments, "--input", str(tmp_path), *keys]) == 0
    holdout = (tmp_path / "a-holdout.jsonl").read_bytes()
    assert main([*arguments, "--input", str(tmp_path), *keys, "--overwrite"]) == 2
    assert "a-holdout.jsonl is a file that --output" in capsys.readouterr().err
    assert (tmp_path / "a-holdout.jsonl").read_bytes() == holdout
