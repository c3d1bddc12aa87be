"""The conditions of a measurement: hardware, versions, date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bebop_megatron.platform import active as cpu_platform


def environment() -> dict[str, Any]:
    """Hardware, versions and date that a number was measured with."""
    out: dict[str, Any] = {"cpu": _cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available() and not cpu_platform():
        out["gpu"] = torch.cuda.get_device_name()
    out["python"] = platform.python_version()
    for package in ("torch", "megatron-core", "bebop-megatron"):
        # asked of the installation: importing Megatron for its version would take seconds
        if any(metadata.distributions(name=package)):
            out[package] = metadata.version(package)
    commit = _commit()
    if commit is not None:
        out["commit"] = commit
    return out | {"date": datetime.now(UTC).date().isoformat()}


def versions(measured_in: dict[str, Any]) -> str:
    """An environment's release, commit and date, for the caption of a figure."""
    commit = f", commit {measured_in['commit']}" if "commit" in measured_in else ""
    return f"bebop-megatron {measured_in.get('bebop-megatron', '')}{commit}, {measured_in['date']}"


def _git(*command: str) -> str | None:
    """What git says in this package's folder; None without git, or where it does not know this file."""
    here = Path(__file__).resolve()
    try:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *command], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()


def _commit() -> str | None:
    """The commit that this package is run from, if it lies in a git tree of its own."""
    # installed below somebody else's repository, this file is not tracked
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changes = " with changes" if _git("status", "--porcelain", "--", "..") else ""
    return f"{_git('rev-parse', '--short=12', 'HEAD')}{changes}"


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
