"""Run by tests/test_study.py: a tiny study of mathematics, interrupted once a number of its jobs have ended.

python -m tests.study_process OUTPUT GSM8K JOBS
"""

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.study.command import report
from benchmarks.study.jobs import Job, Study
from benchmarks.study.plan import QUICK
from benchmarks.study.runner import Runner

TINY = replace(
    QUICK,
    layers=1,
    hidden=32,
    ffn=64,
    vocab_size=320,
    sequence=32,
    batch=2,
    backbone_steps=2,
    warm_steps=2,
    head_steps=2,
    seeds=(1,),
    losses=("kl", "tv"),
    train_k=2,
    gamma=2,
    prompts=4,
    decode_batch=4,
    prompt_tokens=8,
    new_tokens=6,
    temperatures=(1.0,),
    depths=(2,),
    gammas=(2,),
    arms=("own",),
    holdout=0.2,
)


def main(output: str, gsm8k: str, jobs: str) -> None:
    """Run and report; prints what failed, or that it was interrupted."""
    study, ended = Study(Path(output), TINY, ("math",), Path(gsm8k)), []

    def outcome(job: Job) -> str:
        ended.append(job)
        if len(ended) == int(jobs):
            raise KeyboardInterrupt
        return "done"

    try:
        print(Runner(study, 2, print, outcome).run())
    except KeyboardInterrupt:
        print("interrupted")
    report(study)


if __name__ == "__main__":
    main(*sys.argv[1:])
