"""Models other than the dense GPT, through the command line, under two layouts.

Catches: a spec that does not build through Megatron's arguments, a stage of MTP layers alone that gets no batch,
auxiliary-loss logging that hangs when pipeline stages disagree on their layers, experts or delta nets whose losses
depend on the layout.
"""

from __future__ import annotations

import pytest
import torch

from tests.launch import log, pretrain

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]

COMMON = """--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 32 --max-position-embeddings 64
--normalization RMSNorm --disable-bias-linear --swiglu --qk-layernorm --position-embedding-type rope
--untie-embeddings-and-output-weights --mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0""".split()
# DeepSeek-V3: latent attention, experts with a shared one, a balancing loss that is logged
EXPERTS = """--num-layers 2 --mtp-num-layers 2 --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 
--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
--moe-shared-expert-intermediate-size 16 --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-layer-freq [0,1]""".split()
# Qwen3.5: gated delta net with gated attention, zero-centred norms
DELTA = """--group-query-attention --num-query-groups 2 --attention-output-gate --apply-layernorm-1p
--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4
--linear-conv-kernel-dim 3""".split()


@pytest.mark.parametrize(
    ("model", "one", "two"),
    [
        # the first stage has an expert layer less than the second, which holds only MTP layers; the last has no layer
        (EXPERTS, [], ["--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Ett|mm|L"]),
        (
            DELTA,
            ["--hybrid-layer-pattern", "G-*-/*-/*-"],
            ["--hybrid-layer-pattern", "G-|*-/*-/*-", "--pipeline-model-parallel-size", "2"],
        ),
    ],
    ids=["field-cases-20-and-21-stages-that-differ-in-layers", "hybrid-gated-delta-net"],
)
def test_pipeline_stages_give_the_single_process_losses(tmp_path, model, one, two):
    # pipeline ranks initialise from seeds of their own, so both start from one checkpoint
    flags = ["--mtp-loss", "tv", "--train-iters", "5", "--lr", "1e-3"]
    first = pretrain(*flags, *one, "--save", str(tmp_path), "--save-interval", "2", model=[*COMMON, *model])
    assert first.returncode == 0, first.stderr[-3000:]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    stages = int(two[two.index("--pipeline-model-parallel-size") + 1])
    second = pretrain(*flags, *two, "--load", str(tmp_path), model=[*COMMON, *model], processes=stages)
    assert second.returncode == 0, second.stderr[-3000:]
    expected, actual = log(first.stdout), log(second.stdout)
    assert sorted(actual) == [3, 4, 5]
    # Megatron's second log line after a start averages over the first as well
    for iteration in (3, 5):
        for name in ("lm loss", "mtp tv loss", "mtp alpha/1", "mtp alpha/2"):
            wanted = float(expected[iteration][name])
            assert float(actual[iteration][name]) == pytest.approx(wanted, rel=1e-5), (iteration, name)
        assert float(actual[iteration]["mtp tv loss"]) > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [
                "--num-layers",
                "4",
                "--pipeline-model-parallel-size",
                "2",
                "--pipeline-model-parallel-layout",
                "Et*4mm|L",
            ],
            "pipeline rank 0",
        ),
        (["--fp8-format", "hybrid"], "needs Transformer Engine"),
    ],
    ids=["m-on-rank-0", "fp8"],
)
def test_refusals_end_with_one_clear_line(flags, message):
    processes = 2 if "--pipeline-model-parallel-size" in flags else 1
    done = pretrain("--train-iters", "1", "--mtp-loss", "tv", *flags, processes=processes)
    assert done.returncode != 0
    assert message in done.stderr.split("error: ", 1)[1].splitlines()[0], done.stderr[-2000:]
