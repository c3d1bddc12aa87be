"""Training on packed conversations, as a user starts it. Catches boundaries that never reach the model, a rank that
cuts documents in the wrong place, and refusals that come after the model was built.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

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
    one = pretrain(*flags, "--train-iters", "5", "--save", str(tmp_path), "--save-interval", "1", mock_data=False)
    assert one.returncode == 0, one.stderr[-3000:]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    two = pretrain(
        *(*flags, "--train-iters", "5", "--load", str(tmp_path), "--context-parallel-size", "2"),
        processes=2,
        mock_data=False,
    )
    assert two.returncode == 0, two.stderr[-3000:]
    expected, resumed = log(one.stdout), log(two.stdout)
    assert sorted(resumed) == [3, 4, 5]
    # Megatron's second log line after a start averages over the first as well, so 4 is not comparable
    for iteration, tolerance in ((3, 1e-5), (5, 1e-3)):
        for name in ("lm loss", "mtp tv loss", "mtp alpha/1", "mtp alpha/2", "grad norm"):
            value = float(expected[iteration][name])
            assert float(resumed[iteration][name]) == pytest.approx(value, rel=tolerance), (iteration, name)


def arguments(**given):
    plain = {"sft": True, "dataloader_inter_document_masking": False, "hybrid_context_parallel": False}
    plain |= {"micro_batch_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "mock_data": False}
    return SimpleNamespace(**plain | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"micro_batch_size": 2, "pipeline_model_parallel_size": 2}, "use --micro-batch-size 1"),
        ({"hybrid_context_parallel": True}, "use --context-parallel-size alone"),
        ({"mock_data": True}, "give --data-path FILE.jsonl"),
        (
            {"sft": False, "dataloader_inter_document_masking": True, "context_parallel_size": 2},
            "use --sft, which pads them",
        ),
    ],
)
def test_what_packed_batches_cannot_do_is_refused_before_anything_is_built(given, message):
    from bebop_megatron.mcore.batches import prepare_packed_arguments

    with pytest.raises(ValueError, match=message):
        prepare_packed_arguments(arguments(**given))


def test_conversation_that_is_none_is_named(tmp_path):
    from bebop_megatron.mcore.conversations import Conversations

    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n\n{"text": "b"}\n')
    lines = Conversations(str(path))
    assert len(lines) == 2
    assert lines[0] == [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="conversation 1 is not a JSON object"):
        lines[1]


def test_documents_that_cannot_be_cut_or_do_not_cover_their_sample_are_named():
    from bebop_megatron.mcore.sharding import pack, shard

    batch = {"tokens": torch.zeros(1, 12), "cu_seqlens": torch.tensor([[0, 6, 12]])}
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ValueError, match="cuts every packed document into 4 parts"):
        shard(*pack(batch), group)
    with pytest.raises(ValueError, match="covers 6 positions of packed samples, but tokens has 12"):
        pack(batch | {"cu_seqlens": torch.tensor([[0, 6]])})
