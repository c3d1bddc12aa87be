"""Rewards in a process of their own: one that raises, hangs, exits or crashes costs its reward, not the run.

`python -m bebop_megatron.rl.reward` reads pickled (problem, text) pairs from standard input, after the task, and writes
pickled rewards. An alarm of the kernel bounds each call, so that nothing hangs for ever even when nobody is left to
end it.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import IO, Any

from bebop_megatron.rl.task import Problem, Task

# what starting an interpreter may take, on a busy machine
_START_SECONDS = 120.0


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<q", head)[0]))


class Scorer:
    """Computes rewards in a child process; close it, or use it in a `with` block.

    What fails is worth 0 and is counted in `failures`; `last_error` says what the newest was.

    Raises:
        RuntimeError: on the first call, the process does not start.
    """

    def __init__(self, task: Task, timeout: float) -> None:
        self.task, self.timeout = task, timeout
        self.failures = 0
        self.last_error = ""
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            command = [sys.executable, "-m", "bebop_megatron.rl.reward"]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
            assert self._child.stdin is not None
            try:
                _send(self._child.stdin, (self.task, self.timeout))
                self._answer(_START_SECONDS)
            except (OSError, EOFError, TimeoutError) as error:
                self.close()
                raise RuntimeError("the process that computes rewards does not start: its error is above") from error
        return self._child

    def _answer(self, seconds: float) -> Any:
        assert self._child is not None
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return _receive(self._child.stdout)

    def score(self, problem: Problem, text: str) -> float:
        """The reward of a completion; 0 where it cannot be had in time."""
        child = self._start()
        try:
            assert child.stdin is not None
            _send(child.stdin, (problem, text))
            reward, error = self._answer(self.timeout + 5)
        except (OSError, EOFError, TimeoutError):
            self.close()
            self._failed(f"no reward within {self.timeout:g} s, or its process ended")
            return 0.0
        if error is not None:
            self._failed(error)
            return 0.0
        return reward

    def _failed(self, error: str) -> None:
        self.failures += 1
        self.last_error = error

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        child.wait()


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    task, timeout = _receive(requests)
    _send(answers, "ready")
    while True:
        try:
            problem, text = _receive(requests)
        except EOFError:
            return
        # the default action of the signal ends the process, also inside C code
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            reward = float(task.reward(problem, text))
            answer = (reward, None) if math.isfinite(reward) else (0.0, f"the reward is {reward}")
        # whatever a task raises is its own affair, and is reported
        except Exception as error:  # noqa: BLE001
            answer = (0.0, f"{type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)


def main() -> None:
    """Answer until the other side closes its end."""
    answers = os.fdopen(os.dup(1), "wb")
    # a task that prints must not write between the answers
    os.dup2(2, 1)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    _serve(sys.stdin.buffer, answers)


def _watch(parent: int) -> None:
    """End with the parent, also in the middle of a reward."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
