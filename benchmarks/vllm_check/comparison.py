"""vLLM, our evaluator and the expectation side by side: differences with errors clustered by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.study.statistics import PromptCounts, paired_rate
from benchmarks.vllm_check.verifications import Verified, prefix_counts

# of the difference between vLLM and ours: with a larger one, agreement would say too little
LARGEST_STDERR = 0.01
ERRORS = 3.0


@dataclass(frozen=True)
class Row:
    """One number, three times: the share of verifications that accepted at least `position` drafts.

    `stderr` is that of vllm - ours, over independent samples of both; `stderr_expected` that of vllm - expected, over
    the same verifications. `num_drafts` counts vLLM's verifications, as its metrics do, `num_drafts_ours` ours.
    `expected` is None where the exported folder lacks a tensor.
    """

    model: str
    rule: str
    gamma: int
    position: int
    vllm: float
    ours: float
    expected: float | None
    stderr: float
    stderr_expected: float | None
    num_drafts: int
    num_drafts_ours: int
    num_sequences: int
    agree: bool


def compare(
    model: str,
    rule: str,
    vllm: Sequence[Verified],
    ours: Sequence[Verified],
    expected: Sequence[Sequence[Sequence[float]]] | None,
) -> list[Row]:
    """One row for each position; prompts are the units of both differences.

    `expected` has, prompt by prompt, for each of vLLM's verifications that is compared, its prefix acceptance.

    Raises:
        ValueError: other prompts, or expectations of other verifications.
    """
    gamma, rows = vllm[0].gamma, []
    for position in range(1, gamma + 1):
        theirs, mine = prefix_counts(vllm, position), prefix_counts(ours, position)
        difference = paired_rate(theirs, mine, 1)
        stderr = difference.stderr or 0.0
        agree = stderr <= LARGEST_STDERR and abs(difference.value) <= ERRORS * stderr
        value = error = None
        if expected is not None:
            hoped = _expected_counts(expected, theirs, position)
            apart = paired_rate(theirs, hoped, 1)
            value, error = hoped.length, apart.stderr or 0.0
            agree = agree and abs(apart.value) <= ERRORS * error
        rows.append(
            Row(
                model=model,
                rule=rule,
                gamma=gamma,
                position=position,
                vllm=theirs.length,
                ours=mine.length,
                expected=value,
                stderr=stderr,
                stderr_expected=error,
                num_drafts=int(sum(theirs.verifications)),
                num_drafts_ours=int(sum(mine.verifications)),
                num_sequences=len(vllm),
                agree=agree and expected is not None,
            )
        )
    return rows


def _expected_counts(
    expected: Sequence[Sequence[Sequence[float]]], theirs: PromptCounts, position: int
) -> PromptCounts:
    numbers = tuple(float(len(each)) for each in expected)
    if numbers != theirs.verifications:
        raise ValueError("the expectation is of other verifications than vLLM's")
    return PromptCounts(numbers, tuple(sum(step[position - 1] for step in each) for each in expected))


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    head = f"{'model':<12}{'rule':<13}{'pos':>3}{'vLLM':>9}{'ours':>9}{'expected':>10}{'stderr':>9}{'drafts':>8}  agree"
    lines = [head]
    for row in rows:
        expected = f"{row.expected:>10.4f}" if row.expected is not None else f"{'missing':>10}"
        numbers = f"{row.position:>3}{row.vllm:>9.4f}{row.ours:>9.4f}{expected}{row.stderr:>9.4f}{row.num_drafts:>8,}"
        lines.append(f"{row.model:<12}{row.rule:<13}{numbers}  {'yes' if row.agree else 'NO'}")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict]:
    """The rows as `summary.json` has them."""
    return [asdict(row) for row in rows]
