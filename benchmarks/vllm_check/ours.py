"""Our part, a process of its own: `python -m benchmarks.vllm_check.ours JOB.json RESULT.json`.

JOB: checkpoint, rule, gamma, temperature, max_tokens, seed, vocab_size, batch_size, prompts. RESULT: for each prompt
its new tokens and what each verification accepted, as the engine's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Continue every prompt by speculative decoding with the Megatron checkpoint, attention mode `chain`."""
    from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder
    from bebop_megatron.evaluation.loading import load_model

    config = DecodeConfig(
        rule=job["rule"],
        gamma=job["gamma"],
        temperature=job["temperature"],
        attention="chain",
        max_new_tokens=job["max_tokens"],
        batch_size=job["batch_size"],
        seed=job["seed"],
        record=True,
    )
    model = load_model(job["checkpoint"]).model
    result = SpeculativeDecoder(model, config, vocab_size=job["vocab_size"]).generate(job["prompts"])
    # prompts come back in their order; each verification has its anchor, and a record of every step it reached
    accepted: list[dict[int, int]] = [{} for _ in job["prompts"]]
    records = result.records
    assert records is not None
    steps = zip(records.sequence.tolist(), records.anchor.tolist(), records.accepted.tolist(), strict=True)
    for sequence, anchor, taken in steps:
        accepted[sequence][anchor] = accepted[sequence].get(anchor, 0) + int(taken)
    rows = [
        {"tokens": each.tokens, "accepted": [count for _, count in sorted(accepted[index].items())]}
        for index, each in enumerate(result.sequences)
    ]
    return {"sequences": rows}


if __name__ == "__main__":
    outcome = json.dumps(decode(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(outcome)
