"""What a launcher sets for a process, and would set for those of one machine that no launcher starts."""

from __future__ import annotations

import os
import random
import socket

LOOPBACK = "127.0.0.1"
# the kernel takes a connection's own end from 32768 on (49152 on some systems), and could take the port between
# the probe and the rank that listens on it
_PORTS = range(20_000, 32_000)
# of the system, not of a seed: processes that are forked or seeded alike must not choose alike
_RANDOM = random.SystemRandom()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on.

    Raises:
        OSError: a hundred random ports were all taken.
    """
    for _ in range(100):
        port = _RANDOM.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise OSError(f"found no free port between {_PORTS.start} and {_PORTS.stop}")


def rank_environment(rank: int = 0, world: int = 1, port: int | None = None) -> dict[str, str]:
    """The variables by which torch.distributed finds rank `rank` of `world`, all on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port or free_port()),
    }


def is_first() -> bool:
    """Whether this process looks at files, writes them and talks for all; known before torch.distributed is."""
    return os.environ.get("RANK", "0") == "0"


def ensure_environment() -> None:
    """Be a world of one process, unless a launcher started this one."""
    if "RANK" not in os.environ:
        os.environ |= rank_environment()
