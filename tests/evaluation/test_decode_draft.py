"""Every draft step has the distribution that a slow recomputation gives, at ragged positions.

The reference keeps no cache: it lays out anchors and chain steps as one dense sequence under an explicit
mask. Catches: a rotary position off by one, chain keys of an earlier verification that stay visible, keys of
depth 1 missing for accepted tokens, a hidden state from the wrong column, the wrong layer or norm, filters
that q lacks.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder, decode
from bebop_megatron.evaluation.draft import Drafter
from tests.evaluation import tiny

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def seen(monkeypatch):
    """(anchors, drafts, target probabilities) of every iteration."""
    iterations = []
    propose, verify = Drafter.propose, decode.verify

    def spying_propose(self, hidden, anchors, **kwargs):
        draft = propose(self, hidden, anchors, **kwargs)
        iterations.append({"anchors": anchors.tolist(), "draft": draft})
        return draft

    def spying_verify(target_probs, *args, **kwargs):
        iterations[-1]["target"] = target_probs.clone()
        iterations[-1]["out"] = verify(target_probs, *args, **kwargs)
        return iterations[-1]["out"]

    monkeypatch.setattr(Drafter, "propose", spying_propose)
    monkeypatch.setattr(decode, "verify", spying_verify)
    return iterations


MODELS = {
    "rope": {},
    "learned-positions": {"position": "learned_absolute"},
    "tied": {"tied": True},
    "hybrid": tiny.DELTA_NETS["hybrid"],
    "gpt-variant": tiny.DELTA_NETS["gpt-variant"],
}


@pytest.mark.parametrize(
    ("attention", "kind"),
    [("chain", "rope"), ("first-depth", "rope"), *(("chain", k) for k in MODELS if k != "rope")],
)
def test_draft_and_target_distributions_equal_a_recomputation(seen, attention, kind):
    # flat distributions, so that rows accept different numbers of drafts
    model = tiny.build(sharpness=0.15, **MODELS[kind])
    prompts = tiny.prompts(7, 1, 4, 12)
    config = DecodeConfig(attention=attention, max_new_tokens=24, batch_size=4, temperature=0.7, seed=3)
    result = SpeculativeDecoder(model, config, vocab_size=tiny.VOCAB).generate(prompts)
    assert len({tuple(step["out"].num_accepted.tolist()) for step in seen}) > 3
    assert max(step["out"].num_accepted.max() for step in seen) == 3

    texts = [prompt + sequence.tokens for prompt, sequence in zip(prompts, result.sequences, strict=True)]
    checked = 0
    for step in seen:
        if len(step["anchors"]) < 4:
            # a row has left, and others have moved
            break
        for row, anchor in enumerate(step["anchors"]):
            known, drafts = texts[row][: anchor + 2], step["draft"].tokens[row].tolist()
            expected = tiny.draft_logits(model, known, drafts, attention).div(0.7).softmax(-1)
            torch.testing.assert_close(step["draft"].probs[row], expected, atol=2e-5, rtol=1e-3)
            logits = tiny.full_logits(model, known + drafts)[anchor + 1 :]
            torch.testing.assert_close(step["target"][row], logits.div(0.7).softmax(-1), atol=2e-5, rtol=1e-3)
            checked += 1
    assert checked >= 20


def test_chain_and_first_depth_differ_from_the_second_step_on(seen):
    model = tiny.build()
    draws = {}
    for attention in ("chain", "first-depth"):
        seen.clear()
        config = DecodeConfig(attention=attention, rule="rejection", temperature=1.0, max_new_tokens=2)
        SpeculativeDecoder(model, config, vocab_size=tiny.VOCAB).generate(tiny.prompts(9))
        draws[attention] = seen[0]["draft"].probs[0]
    torch.testing.assert_close(draws["chain"][0], draws["first-depth"][0])
    assert (draws["chain"][1] - draws["first-depth"][1]).abs().max() > 1e-3


def test_target_only_drafts_are_the_likeliest_true_tokens(seen):
    # the padding column that would win is not a token
    model = tiny.build(vocab_size=tiny.VOCAB)
    size = tiny.VOCAB - 5
    config = DecodeConfig(rule="target-only", max_new_tokens=8)
    prompts = tiny.prompts(7, vocab_size=size)
    result = SpeculativeDecoder(model, config, vocab_size=size).generate(prompts)
    padded = 0
    for step in seen:
        (anchor,), drafts = step["anchors"], step["draft"].tokens[0].tolist()
        assert step["draft"].probs is None
        logits = tiny.draft_logits(model, (prompts[0] + result.sequences[0].tokens)[: anchor + 2], drafts)
        assert drafts == logits[:, :size].argmax(-1).tolist()
        padded += int((logits.argmax(-1) >= size).sum())
    assert padded > 0
    assert all(token < size for token in result.sequences[0].tokens)


@pytest.mark.parametrize("filter_draft", [True, False])
def test_drafts_are_filtered_like_the_target_unless_told_otherwise(seen, filter_draft):
    model = tiny.build()
    config = DecodeConfig(temperature=1.3, top_k=4, max_new_tokens=8, filter_draft=filter_draft)
    SpeculativeDecoder(model, config, vocab_size=tiny.VOCAB).generate(tiny.prompts(7))
    for step in seen:
        assert ((step["target"] > 0).sum(-1) == 4).all()
        assert ((step["draft"].probs > 0).sum(-1) == (4 if filter_draft else tiny.VOCAB)).all()


def test_models_that_cannot_draft_are_refused():
    with pytest.raises(ValueError, match="needs MTP layers"):
        SpeculativeDecoder(tiny.build(mtp_num_layers=None), DecodeConfig(), vocab_size=tiny.VOCAB)
    distinct = tiny.build(mtp_use_repeated_layer=False)
    with pytest.raises(ValueError, match="3 distinct MTP layers"):
        SpeculativeDecoder(distinct, DecodeConfig(gamma=2), vocab_size=tiny.VOCAB)
    # one step has one meaning only
    one = SpeculativeDecoder(distinct, DecodeConfig(gamma=1, max_new_tokens=4), vocab_size=tiny.VOCAB)
    assert one.generate(tiny.prompts(3)).num_tokens == 4
