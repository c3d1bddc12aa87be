"""Finding a Python 3.12. Catches a shim that exists and refuses, and a message that does not help."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FINDER = Path(__file__).resolve().parent.parent / ".ci" / "find_python"


def find(tmp_path, **environment):
    """Run the finder where only the tools it needs and what the test puts beside them exist."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "env"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    environment = {"PATH": str(tools), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")} | environment
    command = [str(tools / "bash"), str(FINDER)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_refusing_shim_is_passed_over_for_one_that_runs(tmp_path):
    executable(tmp_path / "bin" / "python3.12", "#!/bin/sh\nexit 1\n")
    real = tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python"
    executable(real, f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = find(tmp_path)
    assert done.stdout.strip() == str(real), done.stderr


def test_named_python_comes_first(tmp_path):
    assert find(tmp_path, PYTHON=sys.executable).stdout.strip() == sys.executable


def test_missing_python_is_said_with_what_to_do(tmp_path):
    done = find(tmp_path)
    assert done.returncode == 1
    assert "no Python 3.12 was found" in done.stderr
    assert "make setup PYTHON=" in done.stderr
