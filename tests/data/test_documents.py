"""Reading the inputs.

Catches: a bad line without its number, a missing field taken for an empty one, another order of files on another
machine, lines torn at characters that JSON allows, tests in the standard library's corpus.
"""

from __future__ import annotations

import json
import os
import sysconfig

import pytest

from bebop_megatron.data.documents import Chat, Completion, Text, first_bytes, parse_keys, read_documents
from bebop_megatron.data.stdlib import stdlib_files


def read(*inputs, **options):
    return list(read_documents([str(name) for name in inputs], **options))


def test_a_folder_is_read_in_sorted_order_by_the_suffixes_of_the_format(tmp_path):
    for name in ("b.py", "a.txt", "c.jsonl", "d.bin", "sub/e.md", ".git/f.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"text": "c.jsonl"}\n' if name.endswith("jsonl") else name)
    assert [document.text for document in read(tmp_path)] == ["a.txt", "b.py", "c.jsonl", "sub/e.md"]
    assert [document.text for document in read(tmp_path, format="text")] == ["a.txt", "sub/e.md"]
    assert [document.text for document in read(tmp_path, format="code")] == ["b.py"]
    assert [document.text for document in read(tmp_path, format="jsonl")] == ["c.jsonl"]


def test_each_kind_of_line_becomes_its_kind_of_document(write_jsonl):
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    tools = [{"type": "function"}]
    path = write_jsonl(
        [{"text": "t"}, {"prompt": "p", "completion": "c"}, {"messages": messages, "tools": tools}, {"text": " "}]
    )
    assert read(path) == [
        Text("t", f"{path}, line 1"),
        Completion("p", "c", f"{path}, line 2"),
        Chat(messages, tools, f"{path}, line 3"),
    ]


def test_keys_and_separator(write_jsonl):
    path = write_jsonl([{"question": "q", "answer": "a"}])
    (document,) = read(path, keys=parse_keys("prompt=question,completion=answer"), separator="\n")
    assert (document.prompt, document.completion) == ("q\n", "a")


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path):
    text = "a\u2028b\u0085c\x0cd"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\r\n\n", newline="")
    assert [document.text for document in read(tmp_path / "a.jsonl")] == [text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 2 is not JSON"),
        (b'{"text": "\xff"}', "line 2 is not UTF-8"),
        (b'{"text": "\\ud83d"}', "line 2 is not UTF-8"),
        (b'["text"]', "line 2 must hold a JSON object"),
        (b'{"prompt": "a"}', 'line 2 has no "completion".*--keys completion='),
        (b'{"completion": "a"}', 'line 2 has no "prompt"'),
        (b'{"prompt": "a", "completion": ""}', "line 2: the completion is empty"),
        (b'{"question": "a"}', r"line 2 has neither.*its keys: question.*--keys"),
        (b'{"text": 3}', 'line 2: "text" must be a string, got int 3'),
        (b'{"messages": {"role": "user"}}', 'line 2: "messages" must be a list'),
        (b'{"messages": ["hello"]}', 'line 2: every message must be an object with a "role"'),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "line 2: no message has the role assistant"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.jsonl")


def test_a_key_that_the_user_named_must_be_there(write_jsonl):
    path = write_jsonl([{"text": "would otherwise be read as text"}])
    with pytest.raises(ValueError, match='has no "question"'):
        read(path, keys={"prompt": "question"})


def test_inputs_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="no such file or folder"):
        read(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no file that --format code reads"):
        read(tmp_path, format="code")
    with pytest.raises(ValueError, match="not UTF-8"):
        read(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="choose from auto, text, code, jsonl"):
        read(tmp_path, format="parquet")
    with pytest.raises(ValueError, match="--keys and --separator are for JSON lines"):
        read(tmp_path / "a.txt", separator="\n")


@pytest.mark.parametrize("keys", ["prompt", "prompt=", "question=prompt", "prompt=a,answer=b"])
def test_malformed_keys_are_refused(keys):
    with pytest.raises(ValueError, match="--keys: expected NAME=KEY"):
        parse_keys(keys)


def test_keys_without_json_lines_are_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="--keys and --separator are for JSON lines"):
        read(tmp_path / "a.txt", keys={"prompt": "question"})


def test_a_limit_keeps_whole_documents_from_the_front():
    # ä has two bytes; "c" would fit again behind the one that does not
    documents = [Text("aä", "a"), Completion("ä", "b", "b"), Text("äää", "long"), Text("c", "c")]
    assert list(first_bytes(documents, 6)) == list(first_bytes(documents, 11)) == documents[:2]
    assert list(first_bytes(documents, 5)) == documents[:1]
    assert list(first_bytes(documents, 13)) == documents
    assert list(first_bytes([], 1)) == []
    with pytest.raises(ValueError, match=r"--max-bytes 2: the first document, a, has 3 bytes"):
        list(first_bytes(documents, 2))
    with pytest.raises(ValueError, match="--max-bytes must be at least 1, got 0"):
        list(first_bytes(documents, 0))


def test_the_standard_library_is_here_without_tests():
    files = list(stdlib_files())
    assert any(file.name == "argparse.py" for file in files)
    folders = {part for file in files for part in file.parts[-3:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}


@pytest.mark.parametrize("backwards", [False, True])
def test_the_standard_library_has_the_same_order_on_every_file_system(tmp_path, monkeypatch, backwards):
    kept = ["a.py", "b.py", "json/__init__.py", "json/tool.py", "xml/dom.py"]
    left_out = ["test/a.py", "json/tests/a.py", "site-packages/a.py", "config-3.12-x86/a.py", "json/data.txt", "lib.so"]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    walk = os.walk

    def listed(folder):
        for here, names, files in walk(folder):
            names.sort(reverse=backwards)
            yield here, names, sorted(files, reverse=backwards)

    monkeypatch.setattr(os, "walk", listed)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [file.relative_to(tmp_path).as_posix() for file in stdlib_files()] == kept
