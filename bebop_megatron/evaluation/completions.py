"""The file of sampled completions: what is still to be sampled, how a sample is written, what it was sampled with.

One JSON object per line, in a form that `python -m bebop_megatron.data build` and `--sft` take as they are: "prompt"
and "completion", or "messages" with the answer as the last one. Beside FILE lies FILE.settings.json.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.outcome import Continuation
from bebop_megatron.evaluation.prompts import Prompt
from bebop_megatron.outputs import read_json, write_json

# what a decoder cannot write as text ends in: half a character
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Job:
    """One completion to sample: `prompt` is an index, `sample` counts the completions of this prompt from 0."""

    prompt: int
    sample: int


def prompt_id(prompt: Prompt) -> str:
    """What tells a prompt from others, wherever it stands in its file."""
    return hashlib.sha256(json.dumps(prompt.tokens).encode()).hexdigest()[:16]


def _completion(tokens: list[int], finish: str, stop_tokens: tuple[int, ...], tokenizer: Any) -> str:
    """Text without the token that ended it: training data puts an end of sequence there by itself."""
    kept = tokens[:-1] if finish == "stop" and tokens[-1] in stop_tokens else tokens
    text = tokenizer.decode(kept)
    return text if finish == "stop" else text.rstrip(_UNFINISHED)


@dataclass(frozen=True)
class Writer:
    """Turns continuations into records. Tokens are left out unless asked for, or there is nothing else."""

    tokenizer: Any | None
    stop_tokens: tuple[int, ...]
    tokens: bool = False
    log_probs: bool = False

    def record(self, prompt: Prompt, sample: int, continuation: Continuation) -> dict[str, Any]:
        """One line of the file."""
        out: dict[str, Any] = {"id": prompt_id(prompt), "sample": sample}
        if self.tokenizer is not None and prompt.text is not None:
            text = _completion(continuation.tokens, continuation.finish, self.stop_tokens, self.tokenizer)
            if prompt.messages is not None:
                out["messages"] = [*prompt.messages, {"role": "assistant", "content": text}]
            else:
                out |= {"prompt": prompt.text, "completion": text}
        out |= {"finish": continuation.finish, "num_tokens": len(continuation.tokens)}
        if self.tokens or self.tokenizer is None or prompt.text is None:
            out |= {"prompt_tokens": prompt.tokens, "completion_tokens": continuation.tokens}
        if self.log_probs:
            out |= {"log_probs": continuation.log_probs, "raw_log_probs": continuation.raw_log_probs}
        return out


def is_empty(record: dict[str, Any]) -> bool:
    """Whether the model ended at once, so that there is no text to train on."""
    text = record["messages"][-1]["content"] if "messages" in record else record.get("completion")
    return text == ""


class CompletionFile:
    """An output that may be there in part.

    `settings` are those that change what is sampled; how it is drafted and batched does not.

    Raises:
        ValueError: a file of other settings, or one that something else wrote.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.path, self.sidecar = Path(path), Path(f"{path}.settings.json")
        self.settings = settings
        # completions without text, which no trainer takes: prompt id -> how many
        self.empty: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        if self.path.exists():
            self._resume()

    def _resume(self) -> None:
        if not self.sidecar.exists():
            raise ValueError(f"--output {self.path} is there, but {self.sidecar} is not: choose another file")
        try:
            saved = read_json(self.sidecar)
        except ValueError as error:
            raise ValueError(f"{error}; choose another --output") from error
        if not {"settings", "empty"} <= saved.keys():
            raise ValueError(f"{self.sidecar} was not written by this command: choose another --output")
        changed = {name: saved["settings"].get(name) for name in self.settings}
        wrong = [f"{name}={old!r}, now {self.settings[name]!r}" for name, old in changed.items()
                 if old != self.settings[name]]  # fmt: skip
        if wrong:
            raise ValueError(f"--output {self.path} was sampled with {'; '.join(wrong)}: choose another file")
        self.empty = Counter(saved["empty"])
        content = self.path.read_bytes()
        # an interrupted run may leave half a line
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
            except ValueError:
                record = {}
            if not isinstance(record, dict) or "id" not in record:
                raise ValueError(f"--output {self.path}, line {number} is no completion of this command")
            self.written[record["id"]] += 1

    @property
    def num_done(self) -> int:
        """Completions sampled so far, those without text included."""
        return self.written.total() + self.empty.total()

    def missing(self, prompts: list[Prompt], samples: int) -> list[Job]:
        """What is still to be sampled, so that every line of the prompts has `samples` completions."""
        done, seen, jobs = self.written + self.empty, Counter(), []
        for index, prompt in enumerate(prompts):
            key = prompt_id(prompt)
            for _ in range(samples):
                # equal prompts are counted together
                if seen[key] >= done[key]:
                    jobs.append(Job(index, seen[key]))
                seen[key] += 1
        return jobs

    def append(self, records: Iterable[dict[str, Any]], about: dict[str, Any]) -> None:
        """Write records so that a crash leaves whole ones only; `about` is kept beside the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for record in records:
            if is_empty(record):
                self.empty[record["id"]] += 1
            else:
                self.written[record["id"]] += 1
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        # before the lines: without it they could not be continued
        write_json(self.sidecar, {"settings": self.settings, "empty": dict(self.empty), "about": about})
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
