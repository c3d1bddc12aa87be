"""How backbone and heads are trained: the flags of `bebop_megatron.pretrain`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.study.plan import Head, Size

# below the domain's folder: what is trained on, by name, and what is not
_TEXTS = {"corpus": "corpus", "own": "own/own"}
_HELD_OUT = "corpus-holdout"
_RUN = """--no-create-attention-mask-in-dataloader --num-workers 0 --ckpt-format torch_dist --no-save-optim
--no-save-rng --log-interval 10 --eval-interval 1000000 --eval-iters 4 --tokenizer-type HuggingFaceTokenizer
--lr-warmup-fraction 0.03""".split()


def train(
    size: Size, data: Path, save: Path, *, kind: str, backbone: Path, start: Path, head: Head | None = None
) -> None:
    """Train the backbone, the warm head on it, or (any other `kind`) `head` from `start`, in this process."""
    from bebop_megatron import pretrain

    if kind == "backbone":
        flags = backbone_flags(size, data, save)
    elif kind == "warm":
        flags = warm_flags(size, data, save, backbone)
    else:
        assert head is not None
        flags = head_flags(size, data, save, start, head)
    sys.argv = ["pretrain", *flags]
    pretrain.main()
    shutil.rmtree(save / "cache", ignore_errors=True)


def _model(size: Size, train_k: int) -> list[str]:
    heads = size.hidden // 32
    text = f"""--num-layers {size.layers} --hidden-size {size.hidden} --ffn-hidden-size {size.ffn}
    --num-attention-heads {heads} --group-query-attention --num-query-groups {max(1, heads // 2)} --kv-channels 32
    --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --rotary-base 1000000 --seq-length {size.sequence} --max-position-embeddings {4 * size.sequence}
    --mtp-num-layers {train_k} --mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size {size.batch} --global-batch-size {size.batch}"""
    return text.split()


def _flags(size: Size, data: Path, save: Path, *, train_k: int, steps: int, text: str = "corpus") -> list[str]:
    from bebop_megatron.platform.flags import ON_CPU, UNFUSED

    # a cache of its own: two runs that make the same index at once would disturb each other
    return [
        *_model(size, train_k),
        *ON_CPU,
        *UNFUSED,
        *_RUN,
        *("--train-iters", str(steps), "--save", str(save), "--save-interval", str(steps)),
        *("--train-data-path", str(data / _TEXTS[text]), "--valid-data-path", str(data / _HELD_OUT)),
        *("--data-cache-path", str(save / "cache")),
        *("--tokenizer-model", str(data / "tokenizer")),
    ]


def backbone_flags(size: Size, data: Path, save: Path) -> list[str]:
    """The backbone alone, from scratch: its MTP head stays as initialised."""
    flags = _flags(size, data, save, train_k=size.train_k, steps=size.backbone_steps)
    schedule = ["--lr", str(size.lr), "--min-lr", str(size.lr / 10), "--lr-decay-style", "cosine"]
    return [*flags, *schedule, "--mtp-loss", "ce", "--mtp-freeze-schedule", "mtp"]


def warm_flags(size: Size, data: Path, save: Path, backbone: Path) -> list[str]:
    """The warm head that every head starts from: cross entropy with the corpus' labels, on the finished backbone.

    The head is detached, so that training it beside the backbone would give the same backbone.
    """
    flags = _flags(size, data, save, train_k=size.train_k, steps=size.warm_steps)
    schedule = ["--lr", str(size.lr), "--min-lr", str(size.head_lr), "--lr-decay-style", "cosine"]
    objective = ["--mtp-loss", "ce", "--mtp-freeze-schedule", "backbone"]
    return [*flags, *schedule, *objective, "--pretrained-checkpoint", str(backbone)]


def head_flags(size: Size, data: Path, save: Path, start: Path, head: Head) -> list[str]:
    """One head of the study; the constant rate and the warm-up of 3% are the paper's recipe."""
    flags = _flags(size, data, save, train_k=head.train_k, steps=size.head_steps, text=head.train_data)
    flags += ["--lr", str(size.head_lr), "--lr-decay-style", "constant", "--seed", str(1000 + head.seed)]
    flags += ["--mtp-loss", head.loss, "--mtp-freeze-schedule", "backbone", "--mtp-attention", head.train_attention]
    flags += ["--pretrained-checkpoint", str(start), "--mtp-loss-temperature", str(head.train_temperature)]
    return flags + (["--mtp-loss-warmup", head.warmup] if head.warmup else [])
