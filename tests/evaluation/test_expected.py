"""Acceptance expected from a full forward pass equals a recomputation, and decoding agrees with it.

Catches: a target, a fed token or a judged token one place off; chain keys of another anchor, step or chunk; a draft
distribution without the decoder's filters; steps counted behind the end of a text; an estimate that weights sampled
text wrongly; standard errors that take tokens for independent.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder, filtered_probs, full_forward
from bebop_megatron.evaluation.agreement import length_agreement, rows_of, step_agreement, verifications
from bebop_megatron.evaluation.estimate import clustered_mean, ratio, student_t
from bebop_megatron.evaluation.expected import ExpectedAcceptance, expected_acceptance
from tests.evaluation import tiny

pytestmark = pytest.mark.usefixtures("megatron")
RULES = ("rejection", "target-only")


@pytest.mark.parametrize("chunk_bytes", [1, 64 << 20])
@pytest.mark.parametrize(
    ("attention", "kind"),
    [("chain", {}), ("first-depth", {}), ("chain", {"position": "learned_absolute"}), ("chain", {"latent": True})],
)
def test_every_number_equals_a_recomputation(monkeypatch, attention, kind, chunk_bytes):
    # chunks of 16 anchors, and all at once
    monkeypatch.setattr(full_forward, "_CHUNK_BYTES", chunk_bytes)
    model = tiny.build(sharpness=0.2, **kind)
    texts = tiny.prompts(5, 37, 2, 21)
    config = DecodeConfig(attention=attention, temperature=0.8, top_k=20, filter_draft=False)
    found = expected_acceptance(model, texts, config, vocab_size=tiny.VOCAB, prompt_lengths=[1, 18, 1, 3])
    assert torch.bincount(found.sequence).tolist() == [4, 19, 1, 18]
    assert found.anchor[found.sequence == 1].tolist() == list(range(17, 36))
    for row in range(0, len(found.anchor), 5):
        text, t = texts[found.sequence[row]], int(found.anchor[row])
        fed = [*text[t + 2 :], 0, 0, 0][:3]
        drafts = tiny.draft_logits(model, text[: t + 2], fed, attention)
        q = filtered_probs(drafts, 0.8)
        p = filtered_probs(tiny.full_logits(model, text), 0.8, 20)
        for step in (1, 2, 3):
            known, next_known = t + step < len(text), t + step + 1 < len(text)
            assert bool(found.known[row, step - 1]) is known
            assert bool(found.next_known[row, step - 1]) is next_known
            value = lambda name: float(getattr(found, name)[row, step - 1])  # noqa: B023, E731
            if not known:
                assert value("alpha") == value("target_entropy") == 0
                continue
            target, draft = p[t + step], q[step - 1]
            close = {"abs": 2e-5, "rel": 1e-3}
            assert value("alpha") == pytest.approx(float(torch.minimum(target, draft).sum()), **close)
            assert value("p_argmax_q") == pytest.approx(float(target[draft.argmax()]), **close)
            assert value("target_entropy") == pytest.approx(float(torch.special.entr(target).sum()), **close)
            assert value("draft_entropy") == pytest.approx(float(torch.special.entr(draft).sum()), **close)
            if next_known:
                token = text[t + step + 1]
                assert value("p_next") == pytest.approx(float(target[token]), **close)
                assert value("q_next") == pytest.approx(float(draft[token]), **close)
                assert bool(found.next_is_argmax[row, step - 1]) is (token == int(draft.argmax()))


def test_batching_and_padding_change_nothing_and_the_model_is_left_as_it_was():
    model = tiny.build(sharpness=0.2).train()
    texts = tiny.prompts(5, 37, 1, 21, 9)
    together, single = (
        expected_acceptance(model, texts, DecodeConfig(), vocab_size=tiny.VOCAB, batch_tokens=size)
        for size in (4096, 1)
    )
    torch.testing.assert_close(together.prefix("rejection"), single.prefix("rejection"), atol=1e-5, rtol=1e-4)
    assert set(together.sequence.tolist()) == {0, 1, 3, 4}
    assert all(module.training for module in model.modules())
    assert model.post_process
    assert model.mtp_process


def generated(model, config, vocab_size, count):
    prompts = tiny.prompts(*[3] * count, vocab_size=vocab_size)
    result = SpeculativeDecoder(model, config, vocab_size=vocab_size).generate(prompts)
    texts = [prompt + sequence.tokens for prompt, sequence in zip(prompts, result.sequences, strict=True)]
    return result, texts


CASES = {
    "plain": {},
    "hot": {"temperature": 1.4, "gamma": 2},
    "cold": {"temperature": 0.5, "gamma": 5, "attention": "first-depth"},
    "filtered": {"top_k": 5, "top_p": 0.9, "filter_draft": False},
}


@pytest.fixture(scope="module")
def model(megatron):
    return tiny.build(vocab_size=8, sharpness=0.2, seed=2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_decoding_accepts_what_a_full_forward_expects(model, rule, case):
    config = DecodeConfig(rule=rule, max_new_tokens=40, batch_size=100, record=True, **CASES[case])
    result, texts = generated(model, config, 8, 300)
    assert result.records is not None
    full = expected_acceptance(model, texts, config, vocab_size=8, prompt_lengths=[3] * 300)
    for agreement in step_agreement(result.records, full, rule):
        # late steps of a cold head are rare
        if agreement.step > 2 and agreement.reached < 50:
            continue
        assert agreement.reached > 40
        assert agreement.stderr > 2
        assert abs(agreement.z) < 3, agreement
        assert abs(agreement.calibration) < 3.5, agreement
    # the decoder's own account of the same probabilities, token by token
    rows = rows_of(full, result.records.sequence, result.records.anchor)
    known = (rows >= 0) & full.known[rows.clamp(min=0), result.records.step - 1]
    torch.testing.assert_close(
        full.step(rule)[rows[known], result.records.step[known] - 1], result.records.alpha[known], atol=1e-4, rtol=1e-3
    )
    length = length_agreement(result.records, full, rule)
    assert length.difference.clusters == 300
    assert abs(length.z) < 3, length
    # few texts behind the interval would make it meaningless
    assert length.expected.stderr < 0.05


def verified_at_one_anchor(model, rule):
    """Texts of one prompt sampled without drafts, and how many drafts a decoder accepted that started there."""
    prompt, gamma, count = [1, 4, 2], 3, 4000
    config = DecodeConfig(rule=rule, gamma=gamma, max_new_tokens=gamma + 2, batch_size=500, seed=2, record=True)
    plain = replace(config, gamma=0, max_new_tokens=gamma + 1, seed=1)
    sampled, drafted = (
        SpeculativeDecoder(model, each, vocab_size=8).generate([prompt] * count) for each in (plain, config)
    )
    full = expected_acceptance(
        model, [prompt + s.tokens for s in sampled.sequences], config, vocab_size=8, prompt_lengths=[3] * count
    )
    here = full.select(full.anchor == 2)
    assert here.complete.all()
    assert drafted.records is not None
    _, anchor, accepted = verifications(drafted.records)
    return here, accepted[anchor == 2]


def gaps(here, accepted, rule, teacher_forced=False):
    """Decoded minus expected prefix acceptance, step by step, with standard errors."""
    found = []
    for step, estimate in enumerate(here.rate_per_step(rule, teacher_forced=teacher_forced), 1):
        decoded = (accepted >= step).double()
        stderr = math.hypot(float(decoded.std()) / math.sqrt(len(decoded)), estimate.stderr)
        found.append((float(decoded.mean()) - estimate.value, stderr))
    return found


@pytest.mark.parametrize("rule", RULES)
def test_prefix_acceptance_on_sampled_text_is_that_of_real_verifications(model, rule):
    """Statement (b) at one anchor: the text owes nothing to any draft."""
    here, accepted = verified_at_one_anchor(model, rule)
    for gap, stderr in gaps(here, accepted, rule):
        assert stderr < 0.02
        assert abs(gap) < 3 * stderr


@pytest.mark.parametrize("rule", RULES)
def test_a_target_one_row_off_is_noticed(model, rule, monkeypatch):
    right = full_forward.target_rows
    monkeypatch.setattr(full_forward, "target_rows", lambda start, stop, gamma: right(start, stop, gamma) - 1)
    here, accepted = verified_at_one_anchor(model, rule)
    assert max(abs(gap) / stderr for gap, stderr in gaps(here, accepted, rule)) > 6
    config = DecodeConfig(rule=rule, max_new_tokens=40, batch_size=100, record=True)
    result, texts = generated(model, config, 8, 300)
    assert result.records is not None
    full = expected_acceptance(model, texts, config, vocab_size=8, prompt_lengths=[3] * 300)
    assert max(agreement.worst for agreement in step_agreement(result.records, full, rule)) > 6


def test_the_unbiased_estimate_sums_to_the_decoders_own_chances():
    """Statement (b) without sampling: over every text of two tokens, weighted with the target's probabilities."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 2, 3, 3, generator=generator, dtype=torch.float64).mul(3).softmax(-1).unbind(0)
    # p[0, 0] and q[0, 0] belong to step 1; p[1, x] and q[1, x] to step 2 after token x
    first_p, first_q, best = p[0, 0], q[0, 0], int(q[0, 0].argmax())
    shape = (3, 2)
    alpha = torch.stack([torch.minimum(first_p, first_q).sum().expand(3), torch.minimum(p[1], q[1]).sum(-1)], 1)
    greedy = torch.stack([first_p[best].expand(3), p[1].gather(1, q[1].argmax(-1)[:, None])[:, 0]], 1)
    texts = ExpectedAcceptance(
        sequence=torch.arange(3),
        anchor=torch.zeros(3, dtype=torch.int64),
        known=torch.ones(shape, dtype=torch.bool),
        next_known=torch.tensor([[True, False]] * 3),
        alpha=alpha,
        p_argmax_q=greedy,
        p_next=torch.stack([first_p, torch.zeros(3)], 1),
        q_next=torch.stack([first_q, torch.zeros(3)], 1),
        next_is_argmax=torch.tensor([[x == best, False] for x in range(3)]),
        target_entropy=torch.zeros(shape),
        draft_entropy=torch.zeros(shape),
    )
    # a decoder's: draft x with probability q, accept it, then accept the second draft
    both = sum(float(torch.minimum(first_p, first_q)[x] * alpha[x, 1]) for x in range(3))
    assert float(first_p @ texts.prefix("rejection")[:, 1]) == pytest.approx(both, rel=1e-6)
    assert float(first_p @ texts.prefix("target-only")[:, 1]) == pytest.approx(float(first_p[best] * greedy[best, 1]))
    # the product of the steps is another number
    assert float(first_p @ texts.teacher_forced("rejection")[:, 1]) != pytest.approx(both, rel=1e-3)


def test_what_cannot_be_measured_is_refused(model):
    def measure(texts, config=None, **kwargs):
        return expected_acceptance(model, texts, config or DecodeConfig(), vocab_size=8, **kwargs)

    with pytest.raises(ValueError, match="gamma is 0"):
        measure([[1, 2]], DecodeConfig(gamma=0))
    with pytest.raises(ValueError, match="text 1 holds ids outside the vocabulary of 8 tokens"):
        measure([[1], [9, 1]])
    with pytest.raises(ValueError, match="97 tokens, but the model has 96 positions"):
        measure([[1] * 97])
    with pytest.raises(ValueError, match="1 texts, but 2 prompt lengths"):
        measure([[1, 2]], prompt_lengths=[1, 1])
    with pytest.raises(ValueError, match="unknown verification rule"):
        measure([[1, 2]]).step("greedy")
    nothing = measure([[1], []])
    assert nothing.prefix("rejection").shape == (0, 3)
    assert math.isnan(nothing.accept_length("rejection").value)


def test_gamma_may_differ_from_the_depths_that_were_trained(model):
    texts = tiny.prompts(12, vocab_size=8)
    one, five = (
        expected_acceptance(model, texts, replace(DecodeConfig(), gamma=gamma), vocab_size=8) for gamma in (1, 5)
    )
    torch.testing.assert_close(one.alpha, five.alpha[:, :1])
    assert five.complete.sum() == len(texts[0]) - 5
    for rule, gamma in itertools.product(RULES, (1, 3)):
        rate, length = five.accept_rate(rule, gamma=gamma), five.accept_length(rule, gamma=gamma)
        assert rate.value == pytest.approx((length.value - 1) / gamma)


def test_texts_are_the_units_of_an_estimate():
    values, cluster = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 3, 3, 3])
    estimate = clustered_mean(values, cluster)
    # two independent values, not six
    assert (estimate.value, estimate.clusters) == (0.5, 2)
    assert estimate.stderr == pytest.approx(0.5)
    assert math.isnan(ratio(torch.tensor([1.0]), torch.tensor([2.0])).stderr)
    low, high = estimate.interval()
    assert high - 0.5 == pytest.approx(0.5 * 12.706, rel=0.01)
    assert low + high == pytest.approx(1)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (100, 1.984)])
def test_quantiles_are_students(degrees, quantile):
    assert student_t(0.95, degrees) == pytest.approx(quantile, rel=0.01)
