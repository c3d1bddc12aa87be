"""Order of the test files: the longest first, so that no process is left alone with one at the end."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent
# by measured time, longest first
LONGEST = (
    "test_readme.py",
    "rl/test_loop.py",
    "test_pretrain.py",
    "mcore/test_features.py",
    "evaluation/test_cli.py",
    "test_pretrain_features.py",
    "test_sft.py",
    "test_validation.py",
    "bridges/test_round_trip.py",
    "mcore/test_layouts.py",
    "evaluation/test_decode_parallel.py",
    "mcore/test_mtp_attention_objective.py",
    "test_kill_resume.py",
    "schedule/test_resume.py",
    "losses/test_kernels.py",
    "mcore/test_freeze.py",
    "mcore/test_mtp_attention_cli.py",
)


def pytest_collection_modifyitems(items):
    rank = {name: number for number, name in enumerate(LONGEST)}
    # stable: tests of a file, and all other files, keep their order
    items.sort(key=lambda item: rank.get(item.path.relative_to(ROOT).as_posix(), len(rank)))
