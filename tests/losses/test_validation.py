"""Wrong use dies before anything is computed, and the message says what was wrong and what would be right.

Catches: an option that is silently ignored, a name that falls through to a default, and shapes that broadcast.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bebop_megatron.losses import OBJECTIVES, fused_linear_objective, vocab_parallel_objective
from tests.losses.problem import KINDS

K, N, V, H, M = 2, 3, 7, 4, 5

WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "total-variation"}, r"unknown objective 'total-variation': choose one of " + ", ".join(sorted(KINDS))),
    ({"kind": "TV"}, "unknown objective 'TV'"),
    ({"mix": ("soft", 0.5)}, r"unknown objective 'soft': choose one of ce, kl"),
    ({"mix": ("kl", 1.5)}, "share between 0 and 1, got 1.5"),
    ({"mix": ("kl", -0.1)}, "share between 0 and 1, got -0.1"),
    ({"mix": ("kl", float("nan"))}, "share between 0 and 1, got nan"),
    ({"horizon": "all"}, "unknown horizon 'all': choose one of full, partial, per-depth"),
    ({"reduction": "none"}, "unknown reduction 'none': choose one of mean, sum"),
    ({"backend": "cuda"}, "unknown backend 'cuda': choose one of auto,"),
    ({"kind": "tv", "horizon": "per-depth"}, "'tv' .* no per-depth horizon: use horizon 'full' or 'partial'"),
    ({"kind": "kl", "mix": ("tv", 0.5), "horizon": "per-depth"}, "'tv' .* no per-depth horizon"),
    ({"draft_temperature": 0.0}, "draft_temperature must be positive and finite, got 0.0"),
    ({"draft_temperature": float("inf")}, "draft_temperature must be positive and finite, got inf"),
    ({"target_temperature": -1.0}, "target_temperature must be positive and finite, got -1.0"),
    ({"target_temperature": float("nan")}, "target_temperature must be positive and finite, got nan"),
    ({"logit_scale": 0.0}, "logit_scale must be positive and finite, got 0.0"),
    ({"target_top_p": 0.0}, r"target_top_p must lie in \(0, 1\], got 0.0"),
    ({"target_top_p": 1.1}, r"target_top_p must lie in \(0, 1\], got 1.1"),
    ({"target_top_p": float("nan")}, r"target_top_p must lie in \(0, 1\], got nan"),
    ({"target_top_k": -1}, r"target_top_k must be 0 \(off\) or positive, got -1"),
    ({"truncate_top_k": -1}, r"truncate_top_k must be 0 \(off\) or positive, got -1"),
    ({"kind": "ce", "truncate_top_k": 3}, "a label of 'ce' may not be one"),
    ({"kind": "reverse-kl", "target_top_k": 5}, "'reverse-kl' is infinite wherever target_top_k or target_top_p"),
    ({"kind": "reverse-kl", "target_top_p": 0.9}, "'reverse-kl' is infinite wherever target_top_k or target_top_p"),
    ({"kind": "kl", "mix": ("reverse-kl", 0.5), "target_top_p": 0.9}, "'reverse-kl' is infinite"),
    ({"kind": "ce", "labels": None}, "'ce' needs labels"),
    ({"kind": "kl", "mix": ("ce", 0.5), "labels": None}, "'ce' needs labels"),
    ({"labels": torch.zeros(K, N + 1, dtype=torch.int64)}, r"labels must be int64 \[2, 3\], got torch.int64 \[2, 4\]"),
    ({"labels": torch.zeros(K, N)}, r"labels must be int64 \[2, 3\], got torch.float32 \[2, 3\]"),
    ({"valid": torch.ones(N, K, dtype=torch.bool)}, r"valid must be bool \[2, 3\], got torch.bool \[3, 2\]"),
    ({"valid": torch.ones(K, N)}, r"valid must be bool \[2, 3\], got torch.float32 \[2, 3\]"),
    ({"row_scale": torch.ones(K)}, "row_scale replaces the mean: use reduction='sum'"),
    ({"row_scale": torch.ones(N), "reduction": "sum"}, r"row_scale must be \[2\], got \[3\]"),
    ({"row_scale": torch.ones(K, N), "reduction": "sum"}, r"row_scale must be \[2\], got \[2, 3\]"),
    ({"vocab_size": V + 1}, "has 7 columns on rank 0 of 1, 7 in all, but vocab_size is 8. If .* sharded, pass group"),
    ({"vocab_size": 0}, "but vocab_size is 0"),
]


def over_logits(**changes: Any) -> None:
    options = {"labels": torch.zeros(K, N, dtype=torch.int64)} | changes
    draft = options.pop("draft_logits", torch.randn(K, N, V))
    target = options.pop("target_logits", torch.randn(K, N, V))
    vocab_parallel_objective(draft, target, **options)


def over_hidden(**changes: Any) -> None:
    options = {
        "labels": torch.zeros(K, N, dtype=torch.int64),
        "target_rows": torch.zeros(K, N, dtype=torch.int64),
    } | changes
    draft = options.pop("draft_hidden", torch.randn(K, N, H))
    target = options.pop("target_hidden", torch.randn(M, H))
    weight = options.pop("weight", torch.randn(V, H))
    fused_linear_objective(draft, target, weight, **options)


@pytest.mark.parametrize("call", [over_logits, over_hidden])
def test_right_use_is_accepted(call):
    for kind in OBJECTIVES:
        call(kind=kind)
    call(valid=torch.ones(K, N, dtype=torch.bool), vocab_size=V - 1, backend="torch")
    call(row_scale=torch.ones(K), reduction="sum", mix=("kl", 1.0), target_top_k=99, target_top_p=1.0)


@pytest.mark.parametrize("call", [over_logits, over_hidden])
@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_refused(call, options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ce"])
def test_only_cross_entropy_does_without_a_target(kind):
    message = "compares with the target: .* may be None only for 'ce'"
    for call, name in ((over_logits, "target_logits"), (over_hidden, "target_hidden")):
        with pytest.raises(ValueError, match=message):
            call(kind=kind, **{name: None})
        with pytest.raises(ValueError, match=message):
            call(kind="ce", mix=(kind, 0.5), **{name: None})
        call(kind="ce", **{name: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_logits": torch.randn(N, V)}, r"draft_logits must be \[k, n, v/tp\], got \[3, 7\]"),
        ({"draft_logits": torch.randn(0, N, V)}, "draft_logits has no depth: k must be at least 1"),
        ({"target_logits": torch.randn(N, V)}, r"aligned per depth, \[2, 3, 7\], got \[3, 7\]"),
        ({"target_logits": torch.randn(1, N, V)}, r"aligned per depth, \[2, 3, 7\], got \[1, 3, 7\]"),
        ({"target_logits": torch.randn(K, N, V + 1)}, r"aligned per depth, \[2, 3, 7\], got \[2, 3, 8\]"),
    ],
)
def test_logits_must_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        over_logits(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_hidden": torch.randn(N, H)}, r"draft_hidden must be \[k, n, h\] with k at least 1, got \[3, 4\]"),
        ({"draft_hidden": torch.randn(0, N, H)}, r"with k at least 1, got \[0, 3, 4\]"),
        ({"weight": torch.randn(H, V)}, r"weight must be \[v/tp, 4\] .*, got \[4, 7\]"),
        ({"weight": torch.randn(V)}, r"weight must be \[v/tp, 4\] .*, got \[7\]"),
        ({"target_hidden": torch.randn(M, H + 1)}, r"target_hidden must be \[m, 4\], got \[5, 5\]"),
        ({"target_hidden": torch.randn(K, N, H)}, r"target_hidden must be \[m, 4\], got \[2, 3, 4\]"),
        ({"target_rows": torch.zeros(N, K, dtype=torch.int64)}, r"must be int64 \[2, 3\], got torch.int64 \[3, 2\]"),
        ({"target_rows": torch.zeros(K, N, dtype=torch.int32)}, r"must be int64 \[2, 3\], got torch.int32 \[2, 3\]"),
        ({"chunk_tokens": 0}, "chunk_tokens must be positive, got 0"),
    ],
)
def test_hidden_states_must_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        over_hidden(**changes)
