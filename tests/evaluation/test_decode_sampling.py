"""Speculation changes no distribution, and what is counted is what happened.

Catches: a bonus token from the wrong position, a wrong q, a "same token, so accept" shortcut, acceptance
counted for steps that were never reached, probabilities recorded of another distribution than the one in
force.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder, decode, filtered_probs, verify
from bebop_megatron.evaluation.outcome import ACCEPT_PROB, ACCEPTED, ALPHA, REACHED
from tests.evaluation import tiny

pytestmark = pytest.mark.usefixtures("megatron")

SMALL, SAMPLES = 5, 12_000
FILTERS = {"plain": {}, "filtered": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "filter_draft": False}}


def _exact(model, prompt, config):
    """Probability of every continuation of three tokens, from full forward passes."""

    def after(tokens):
        logits = tiny.full_logits(model, tokens)[-1]
        return filtered_probs(logits, config.temperature, config.top_k, config.top_p).double()

    exact = torch.zeros(SMALL, SMALL, SMALL, dtype=torch.float64)
    first = after(prompt)
    for a, b in itertools.product(range(SMALL), repeat=2):
        if first[a] > 0:
            exact[a, b] = first[a] * after([*prompt, a])[b] * after([*prompt, a, b])
    return exact.flatten()


def _surprise(model, config):
    """Standard deviations that the chi-square statistic of sampled continuations lies above its mean."""
    prompt = [1, 4, 2]
    result = SpeculativeDecoder(model, config, vocab_size=SMALL).generate([prompt] * SAMPLES)
    assert 0.1 < result.accept_rate < 0.9
    codes = torch.tensor([(a * SMALL + b) * SMALL + c for a, b, c in (s.tokens for s in result.sequences)])
    counts, expected = (
        torch.bincount(codes, minlength=SMALL**3).double(),
        _exact(model, prompt, config) * SAMPLES,
    )
    assert counts[expected == 0].sum() == 0
    common = expected >= 10
    rest = counts[~common].sum() - expected[~common].sum()
    statistic = ((counts - expected).square() / expected)[common].sum()
    statistic += rest.square() / expected[~common].sum().clamp(min=1)
    degrees = int(common.sum())
    # Wilson and Hilferty: the cube root is close to normal
    return (float(statistic / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))


@pytest.fixture(scope="module")
def small(megatron):
    return tiny.build(vocab_size=SMALL, sharpness=0.25, seed=4)


def _config(rule, **overrides):
    return DecodeConfig(rule=rule, max_new_tokens=3, batch_size=400, **overrides)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rule", ["rejection", "target-only"])
def test_sampled_text_is_distributed_as_the_targets_own(small, rule, filters):
    assert abs(_surprise(small, _config(rule, **FILTERS[filters]))) < 3.5


def test_the_test_notices_a_wrong_draft_distribution(small, monkeypatch):
    def wrong(target_probs, draft_probs, *args, **kwargs):
        # as if the temperature of the drafts had been forgotten
        return verify(target_probs, draft_probs.pow(0.7) / draft_probs.pow(0.7).sum(-1, True), *args, **kwargs)

    monkeypatch.setattr(decode, "verify", wrong)
    assert _surprise(small, _config("rejection")) > 6


def test_the_test_notices_a_recovered_token_that_may_be_the_rejected_one(small, monkeypatch):
    def wrong(target_probs, *args, **kwargs):
        out = verify(target_probs, *args, **kwargs)
        rows = torch.arange(len(target_probs))
        again = torch.multinomial(target_probs[rows, out.num_accepted], 1, generator=kwargs["generator"])
        return type(out)(
            out.num_accepted,
            out.tokens.scatter(1, out.num_accepted[:, None], again),
            out.accept_prob,
            out.alpha,
        )

    monkeypatch.setattr(decode, "verify", wrong)
    assert _surprise(small, _config("target-only")) > 6


@pytest.mark.parametrize("rule", ["rejection", "target-only"])
def test_accepted_drafts_follow_probabilities_that_a_full_forward_confirms(rule):
    model = tiny.build(vocab_size=8, sharpness=0.2, seed=2)
    config = DecodeConfig(rule=rule, temperature=0.9, max_new_tokens=40, batch_size=100, record=True)
    prompts = tiny.prompts(*[3] * 400, vocab_size=8)
    result = SpeculativeDecoder(model, config, vocab_size=8).generate(prompts)
    records = result.records
    assert records is not None

    # the sum of (accepted - probability) over all steps reached is zero within its standard error
    for step in (1, 2, 3):
        here = records.step == step
        for probability in (records.accept_prob[here].double(), records.alpha[here].double()):
            error = (probability * (1 - probability)).sum().sqrt()
            assert error > 3
            assert abs((records.accepted[here].double() - probability).sum() / error) < 3, step

    checked = 0
    for index in (records.sequence < 4).nonzero()[:, 0].tolist():
        sequence, anchor, step = (int(x[index]) for x in (records.sequence, records.anchor, records.step))
        text = prompts[sequence] + result.sequences[sequence].tokens
        # drafts behind the length limit are not in the text
        if anchor + step >= len(text):
            continue
        drafts = [*text[anchor + 2 : anchor + 1 + step], int(records.token[index])]
        q = tiny.draft_logits(model, text[: anchor + 2], drafts).div(0.9).softmax(-1)[-1]
        p = tiny.full_logits(model, text[: anchor + step + 1])[-1].div(0.9).softmax(-1)
        y = drafts[-1]
        if rule == "target-only":
            assert y == int(q.argmax())
            expected = accept = p[y]
        else:
            expected, accept = torch.minimum(p, q).sum(), (p[y] / q[y]).clamp(max=1)
        assert float(records.alpha[index]) == pytest.approx(float(expected), abs=1e-4)
        assert float(records.accept_prob[index]) == pytest.approx(float(accept), abs=1e-4, rel=1e-3)
        assert not records.accepted[index] or anchor + step + 1 >= len(text) or text[anchor + step + 1] == y
        checked += 1
    assert checked > 100


def test_counts_are_the_records_summed():
    model = tiny.build(sharpness=0.2, seed=2)
    config = DecodeConfig(max_new_tokens=30, batch_size=4, record=True)
    result = SpeculativeDecoder(model, config, vocab_size=tiny.VOCAB).generate(tiny.prompts(*[3] * 11))
    records = result.records
    assert records is not None
    for sequence, step in itertools.product(range(11), range(3)):
        here = (records.sequence == sequence) & (records.step == step + 1)
        counts = result.counts[sequence, step]
        assert counts[REACHED] == here.sum()
        assert counts[ACCEPTED] == records.accepted[here].sum()
        assert float(counts[ACCEPT_PROB]) == pytest.approx(float(records.accept_prob[here].double().sum()))
        assert float(counts[ALPHA]) == pytest.approx(float(records.alpha[here].double().sum()))
    first, accepted = records.step == 1, records.accepted
    assert result.num_verifications == first.sum()
    assert result.accept_length == pytest.approx(1 + float(accepted.sum() / first.sum()))
    assert result.accept_rate == pytest.approx(float(accepted.sum() / first.sum()) / 3)
    assert result.rate_per_step[1] <= result.conditional_rate_per_step[1]
    # every verification yields its accepted drafts and one token; what exceeds the limit is cut off
    produced = int(accepted.sum()) + result.num_verifications + len(result.sequences)
    assert result.num_tokens <= produced < result.num_tokens + 3 * len(result.sequences) + 1
