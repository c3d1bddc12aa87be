"""What Megatron's loop is told of the objective's work, and the objective of the loop's progress.

Catches: a throughput that counts gradients nobody computes, and a warm-up that starts again at every micro-batch.
"""

from __future__ import annotations

import sys

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import training
from megatron.training.arguments import parse_args

from bebop_megatron.config import ObjectiveConfig
from bebop_megatron.mcore import attach, attached, set_iteration
from bebop_megatron.mcore.training_loop import install_training_loop, uninstall_training_loop


@pytest.fixture
def loop(request):
    install_training_loop(ObjectiveConfig(loss="tv", joint=request.param))
    yield request.param
    uninstall_training_loop()


@pytest.mark.parametrize("loop", [False, True], indirect=True)
def test_throughput_counts_the_products_that_are_computed(loop, monkeypatch):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --kv-channels 16 --seq-length 32"
    shape += " --mtp-num-layers 3"
    monkeypatch.setattr(sys, "argv", ["pretrain", *shape.split()])
    args = parse_args()
    args.padded_vocab_size, args.ffn_hidden_size = 1000, 256
    counted = training.num_floating_point_operations.__wrapped__(args, 4)
    product = 2 * 4 * 32 * 64 * 1000
    # Megatron: three for the model's own loss and for each depth. Ours: the target once more, each depth two, or four
    # where the LM head trains too
    assert training.num_floating_point_operations(args, 4) - counted == product * (1 + (3 if loop else -3))
    lengths = {"seqlen_squared_sum_in_batch": 100, "total_real_tokens_in_batch": 20}
    by_length = training.num_floating_point_operations.__wrapped__(args, 4, **lengths)
    extra = training.num_floating_point_operations(args, 4, **lengths) - by_length
    assert extra == 2 * 20 * 64 * 1000 * (1 + (3 if loop else -3))


def test_a_warm_up_wants_to_know_the_iteration():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_num_layers=2)
    attach(config, ObjectiveConfig(loss="tv", warmup="kl:4"))
    attachment = attached(config)
    with pytest.raises(RuntimeError, match="set_iteration"):
        attachment.current_iteration()
    set_iteration(config, 3)
    assert attachment.current_iteration() == 3
    plain = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, mtp_num_layers=2)
    attach(plain, ObjectiveConfig(loss="tv"))
    assert attached(plain).current_iteration() == 0
