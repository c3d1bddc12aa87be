"""What a fork does between its birth and its end: it works with its own streams and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def work_and_exit(work: Callable[[], object], stdout: str, stderr: str) -> NoReturn:
    """Do `work` with its output appended to these files, and end the process, with the status of a program.

    What ends the work is printed: a traceback, or what `SystemExit` says.
    """
    for handle, name in ((1, stdout), (2, stderr)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), handle)
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whoever waits must be able to read whatever ended the work
        traceback.print_exc()
    finally:
        # the checkpoint writer's process does not notice an exit that skips the interpreter's own
        for writer in multiprocessing.active_children():
            writer.terminate()
            writer.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
