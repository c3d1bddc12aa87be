"""Runs the training entry point several times from one interpreter: imports are paid once, each run is a fork of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.launch import MODEL, ROOT, RUN


class Run:
    """What one run printed and how it ended."""

    def __init__(self, returncode: int, output: str) -> None:
        self.returncode = returncode
        self.output = output

    def succeeded(self) -> str:
        """Its output.

        Raises:
            AssertionError: it failed; with the end of what it printed.
        """
        assert self.returncode == 0, self.output[-4000:]
        return self.output


def pretrain_all(folder: Path, *runs: list[str]) -> list[Run]:
    """Run `bebop_megatron.pretrain` on the CPU once for each list of flags, one after another, in one process each."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    specification = json.dumps([[*MODEL, *RUN, "--mock-data", *flags] for flags in runs])
    subprocess.run(
        [sys.executable, "-m", "tests.forks", str(folder)],
        input=specification,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=1200,
        check=True,
    )
    codes = json.loads((folder / "codes.json").read_text())
    return [Run(code, (folder / f"{i}.log").read_text()) for i, code in enumerate(codes)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _fork(arguments: list[str], log: Path) -> int:
    os.environ["MASTER_PORT"] = str(_free_port())
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = 1
    try:
        from bebop_megatron import pretrain

        sys.argv = ["pretrain", *arguments]
        pretrain.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code and not isinstance(end.code, int):
            print(end.code)
    except BaseException:  # noqa: BLE001 - the parent must hear of whatever ended the run
        import traceback

        traceback.print_exc()
    finally:
        # the checkpoint writer's process does not notice an exit that skips the interpreter's own
        for writer in multiprocessing.active_children():
            writer.terminate()
            writer.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork the runs that standard input asks for."""
    folder = Path(sys.argv[1])
    runs = json.loads(sys.stdin.read())
    from bebop_megatron.platform import enter

    enter()
    import megatron.training.training  # noqa: F401 - paid once for all runs

    codes = [_fork(arguments, folder / f"{i}.log") for i, arguments in enumerate(runs)]
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
