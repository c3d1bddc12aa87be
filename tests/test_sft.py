"""Training on packed conversations, as a user starts it. Catches boundaries that never reach the model, a rank that
cuts documents in the wrong place, and refusals that come after the model was built.
"""

from __future__ import annotations

import json
import random

import pytest
import torch

from tests.launch import log, pretrain

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]

# in the prompt format, system, user and assistant lines begin with these words
ROLES = ["<unk>", "<SPECIAL_233>", "<SPECIAL_10>System", "<SPECIAL_11>User", "<SPECIAL_11>Assistant"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Arguments for packed conversations whose lengths are multiples of four, so that no layout pads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("sft")
    vocabulary = {word: i for i, word in enumerate(ROLES + [f"w{i}" for i in range(80)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="w0")
    fast.save_pretrained(folder / "tokenizer")

    generator = random.Random(3)
    say = lambda n: " ".join(f"w{generator.randrange(80)}" for _ in range(n))  # noqa: E731
    lines = []
    for _ in range(8):
        messages = []
        for _ in range(generator.randint(1, 4)):
            asked = generator.randint(1, 6)
            # three role words and one word of the system
            answered = generator.randint(2, 8) // 4 * 4 + -asked % 4 + 1
            answered += -(4 + asked + answered) % 4
            for role, n in (("system", 1), ("user", asked), ("assistant", answered)):
                messages.append({"role": role, "content": say(n)})
        lines.append(json.dumps({"messages": messages}))
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return [
        *("--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder / "tokenizer")),
        *("--data-path", str(folder / "chat.jsonl"), "--split", "100,0,0", "--eval-iters", "0"),
        *("--micro-batch-size", "1", "--mtp-loss", "tv", "--calculate-per-token-loss"),
    ]


def test_context_parallel_run_continues_the_single_process_run(flags, tmp_path):
    one = pretrain(*flags, "--train-iters", "4", "--save", str(tmp_path), "--save-interval", "1", mock_data=False)
    assert one.returncode == 0, one.stderr[-3000:]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    two = pretrain(
        *(*flags, "--train-iters", "4", "--load", str(tmp_path), "--context-parallel-size", "2"),
        processes=2,
        mock_data=False,
    )
    assert two.returncode == 0, two.stderr[-3000:]
    expected, resumed = log(one.stdout), log(two.stdout)
    assert sorted(resumed) == [2, 3, 4]
    # Megatron's second log line after a start averages over the first as well, so 3 is not comparable
    for iteration in (2, 4):
        for name in ("lm loss", "mtp tv loss", "mtp alpha/1", "mtp alpha/2", "grad norm"):
            assert float(resumed[iteration][name]) == pytest.approx(float(expected[iteration][name]), rel=1e-3), name


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--micro-batch-size", "2", "--pipeline-model-parallel-size", "2"], "use --micro-batch-size 1"),
        (["--data-path", "/nowhere/chat.jsonl"], "give the .jsonl file of conversations"),
    ],
)
def test_what_packed_batches_cannot_do_is_refused_before_the_model_is_built(flags, extra, message):
    processes = 2 if "--pipeline-model-parallel-size" in extra else 1
    done = pretrain(*flags, "--train-iters", "1", *extra, processes=processes, mock_data=False)
    assert done.returncode != 0
    assert message in done.stderr
