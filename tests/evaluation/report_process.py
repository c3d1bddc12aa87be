"""Two heads reported, the report resumed, entropy over both: in one process, as a user has it who compares.

The arguments: CHECKPOINT PROMPTS FOLDER, then the sizes of the sweeps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bebop_megatron.evaluation.__main__ import main


def run(checkpoint: str, prompts: str, folder: str, *sizes: str) -> None:
    """Every command of the reports on one checkpoint under two names."""
    out = Path(folder)
    heads = ["--load", checkpoint, "--label", "a", "--load", checkpoint + "@12", "--label", "b", "--prompts", prompts]

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}

    main([*heads, "--report", folder, *sizes])
    before = times()
    removed = sorted(before)[3]
    (out / "cells" / removed).unlink()
    (out / "report.md").unlink()
    main([*heads, "--report", folder, *sizes])
    after = times()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [removed]
    main(["entropy", *heads, "--in-time", "--report", str(out / "entropy"), *sizes[:6], "--quiet"])
    main(["entropy", *heads[:4], "--text", prompts, "--report", str(out / "given"), "--rule", "rejection", "--quiet"])
    print("done")


if __name__ == "__main__":
    run(*sys.argv[1:])
