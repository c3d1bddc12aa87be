"""Order of the test files: the longest first, so that no process is left alone with one at the end."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent
# by measured time, longest first
LONGEST = (
    "test_readme.py",
    "rl/test_loop.py",
    "test_pretrain.py",
    "evaluation/test_decode_sampling.py",
    "mcore/test_layouts.py",
    "mcore/test_features.py",
    "losses/test_kernels.py",
    "test_study.py",
    "mcore/test_freeze.py",
    "evaluation/test_decode_parallel.py",
    "test_cluster_scripts.py",
    "losses/test_vocab_parallel.py",
    "evaluation/test_expected.py",
    "evaluation/test_decode_batch.py",
    "estimate/test_estimate.py",
    "bridges/test_round_trip.py",
    "test_benchmarks.py",
    "test_kill_resume.py",
)


def pytest_collection_modifyitems(items):
    rank = {name: number for number, name in enumerate(LONGEST)}
    # stable: tests of a file, and all other files, keep their order
    items.sort(key=lambda item: rank.get(item.path.relative_to(ROOT).as_posix(), len(rank)))
