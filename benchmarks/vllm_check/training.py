"""From random weights to a folder that an engine serves, by the commands that users have."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop_megatron.convert.importing import FLAGS_FILE
from bebop_megatron.launcher import rank_environment
from bebop_megatron.platform.flags import ON_CPU, UNFUSED
from benchmarks.vllm_check.plan import GAMMA, Model, Size

ROOT = Path(__file__).resolve().parents[2]
_RUN = """--no-create-attention-mask-in-dataloader --num-workers 0 --ckpt-format torch_dist --no-save-optim
--no-save-rng --log-interval 10 --eval-interval 1000000 --eval-iters 1 --tokenizer-type HuggingFaceTokenizer""".split()


def run(command: Sequence[str], log: Path, **environment: str) -> None:
    """Run a command to its end; what it prints goes to `log`.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | environment, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{shlex.join(command[:6])} ... failed ({done.returncode}); {log} ends with\n{tail}")


def prepare_data(folder: Path, size: Size, gsm8k: Path | None) -> None:
    """Tokenizer, corpus and held-out prompts: GSM8K where there is one, else the standard library's sources."""
    from benchmarks.study import corpora, plan

    domain = corpora.CODE if gsm8k is None else corpora.MATH
    study = plan.Size(
        vocab_size=size.vocab_size,
        corpus_bytes=size.corpus_bytes,
        holdout=size.holdout,
        prompts=size.prompts,
        prompt_tokens=size.prompt_tokens,
        new_tokens=size.new_tokens,
    )
    corpora.prepare(domain, folder, study, gsm8k)


def make_model(model: Model, tokenizer: Path, folder: Path, size: Size) -> None:
    """Random weights in a Hugging Face folder, as transformers initialises them; no MTP head."""
    import torch
    import transformers

    text = "Text" if model.architecture.startswith("Qwen3_5") else ""
    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    ends = {"eos_token_id": words.eos_token_id, "bos_token_id": None, "pad_token_id": words.pad_token_id}
    config = getattr(transformers, f"{model.architecture}{text}Config")(
        **model.settings, **ends, vocab_size=size.vocab_size
    )
    torch.manual_seed(size.seed)
    getattr(transformers, f"{model.architecture}ForCausalLM")(config).float().save_pretrained(folder)
    words.save_pretrained(folder)


def _pretrain(folder: Path, save: str, data: Path, size: Size, steps: int, flags: Sequence[str]) -> None:
    """Train from a checkpoint below `folder`, with the model's flags as the import wrote them."""
    model = shlex.split((folder / "imported" / FLAGS_FILE).read_text())
    batch = ["--seq-length", size.sequence, "--micro-batch-size", size.batch, "--global-batch-size", size.batch]
    length = ["--train-iters", steps, "--save-interval", steps, "--save", folder / save]
    text = ["--data-path", data / "corpus", "--split", "99,1,0", "--data-cache-path", folder / save / "cache"]
    words = [*model, *ON_CPU, *UNFUSED, *_RUN, *batch, *length, *text, "--tokenizer-model", data / "tokenizer", *flags]
    # one process needs no torchrun
    command = [sys.executable, "-m", "bebop_megatron.pretrain", *map(str, words), "--seed", str(size.seed)]
    run(command, folder / "logs" / f"{save}.log", **rank_environment())


def _convert(folder: Path, command: str, *flags: Any) -> None:
    words = [sys.executable, "-m", "bebop_megatron.convert", command, *map(str, flags)]
    run(words, folder / "logs" / f"{command}.log")


def train(model: Model, folder: Path, data: Path, size: Size) -> None:
    """Random weights, import, training, adaptation of the head with the backbone frozen: `folder`/adapted.

    Raises:
        RuntimeError: a command failed.
    """
    make_model(model, data / "tokenizer", folder / "random", size)
    start = ["--hf", folder / "random", "--output", folder / "imported"]
    _convert(folder, "import", *start, "--init-mtp", "last-layer", "--mtp-depth", GAMMA)
    warm = f"--mtp-loss ce --lr {size.lr} --min-lr {size.lr / 10} --lr-decay-style cosine --lr-warmup-fraction 0.08"
    warm = [*warm.split(), "--pretrained-checkpoint", str(folder / "imported")]
    _pretrain(folder, "backbone", data, size, size.backbone_steps, warm)
    tv = f"--mtp-loss tv --mtp-freeze-schedule backbone --lr {size.head_lr} --lr-decay-style constant"
    tv = [*tv.split(), "--lr-warmup-fraction", "0.03", "--pretrained-checkpoint", str(folder / "backbone")]
    _pretrain(folder, "adapted", data, size, size.head_steps, tv)


def export(model: Model, folder: Path) -> None:
    """`folder`/exported: what vLLM is given.

    Raises:
        RuntimeError: the command failed.
    """
    paths = ["--load", folder / "adapted", "--hf", folder / "random", "--output", folder / "exported"]
    _convert(folder, "export", *paths, "--dtype", model.dtype)
