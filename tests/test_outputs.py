"""Outputs: found unwritable before the work, written by one process at a time, there whole or not at all.

Catches: hours of work whose result cannot be written, two runs that mix their files, a lock that outlives its run or
that a forked child keeps; a half written file after a crash; NaN in JSON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bebop_megatron.outputs import PartialFolder, check_writable, held, hold, read_json, replacing, write_json

# holds what it is told to until its input ends
HOLDER = """
import os, sys, time
from pathlib import Path
from bebop_megatron.outputs import PartialFolder, held, hold
kind, place = sys.argv[1:]
if kind == "folder":
    kept = hold(place, "--save")
elif kind == "file":
    kept = held(place, "--output"); kept.__enter__()
else:
    kept = PartialFolder(Path(place)); kept.begin(); (kept.path / "half").write_text("")
# as a checkpoint's writer would: it must not keep the lock
if os.fork() == 0:
    os.close(0); os.close(1)
    time.sleep(20 if kind == "folder" else 0); os._exit(0)
print("held", flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def take(kind: str, place: Path) -> None:
    if kind == "folder":
        hold(place, "--save").close()
    elif kind == "file":
        with held(place, "--output"):
            pass
    else:
        partial = PartialFolder(place)
        partial.begin()
        assert [path.name for path in partial.path.iterdir()] == [".writer"]
        partial.publish()
        partial.end(None)


@pytest.mark.parametrize("kind", ["folder", "file", "partial"])
def test_one_process_at_a_time_and_a_killed_one_lets_go(tmp_path, kind):
    place = tmp_path / "out"
    command = [sys.executable, "-c", HOLDER, kind, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run is writing"):
            take(kind, place)
        other.stdin.close()
    assert other.returncode == -9
    take(kind, place)
    left = {"folder": ["out"], "file": [], "partial": ["out"]}
    assert [path.name for path in tmp_path.iterdir()] == left[kind]


def test_what_cannot_be_written_is_found_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output .*file/x\.json cannot be written: (File exists|Not a directory)"):
        check_writable(tmp_path / "file" / "x.json", "--output")
    with pytest.raises(ValueError, match=r"--save .* cannot be written: (File exists|Not a directory)"):
        check_writable(tmp_path / "file", "--save", is_folder=True)
    with pytest.raises(ValueError, match="is a folder: give a file"):
        check_writable(tmp_path, "--output")
    check_writable(tmp_path / "new" / "x.json", "--output")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_full_disk_in_a_conversion_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    import torch

    from bebop_megatron.bridges.huggingface import FolderWriter, Planned
    from bebop_megatron.mcore.torch_dist import TorchDistWriter

    real = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, mode="r", *a, **k: real(Path("/dev/full") if mode == "wb" else self, mode, *a, **k),
    )
    tensor = torch.zeros(1 << 16)
    plan = {"model.safetensors": [Planned("x", tensor.shape, tensor.dtype)]}
    # a device cannot be cut to a length
    with pytest.raises(OSError, match=r"Invalid argument|No space left"), FolderWriter(tmp_path / "hf", plan) as writer:
        writer.write("x", tensor)
    with pytest.raises(OSError, match="No space left"), TorchDistWriter(tmp_path / "mcore") as writer:
        writer.add("x", tensor)
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite_become_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": [math.nan, 1.5, (math.inf,)]})
    assert read_json(tmp_path / "a.json") == {"a": [None, 1.5, [None]]}


def _write_half(path):
    path.write_text("{")
    raise InterruptedError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    with pytest.raises(InterruptedError), replacing(tmp_path / "a.json") as partial:
        _write_half(partial)
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_who_reads_while_it_is_written_sees_the_old_file_whole(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with (tmp_path / "a.json").open() as reader:
        write_json(tmp_path / "a.json", {"b": 2})
        assert json.load(reader) == {"a": 1}
