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
from bebop_megatron.evaluation.outcome import ACCEPT_PROB, ACCEPTED, ALPHA, DRAFTED, REACHED
from tests.evaluation import tiny
from tests.evaluation.test_verify import textbook

pytestmark = pytest.mark.usefixtures("megatron")

SMALL, SAMPLES = 5, 8_000
SETTINGS = {
    "plain": {},
    "filtered": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "filter_draft": False},
    # drafts, the bonus token, and a second verification within three tokens
    "one-draft": {"gamma": 1},
    "cold": {"temperature": 0.6, "gamma": 2},
    "adaptive": {"adaptive_gamma": True, "draft_cost": 0.4},
}
MODELS = {"gpt": {}, "delta-net": tiny.DELTA_NETS["hybrid"]}


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
    assert 0.04 < result.accept_rate < 0.9
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
    return {kind: tiny.build(vocab_size=SMALL, sharpness=0.25, seed=4, **model) for kind, model in MODELS.items()}


def _config(rule, **overrides):
    return DecodeConfig(rule=rule, max_new_tokens=3, batch_size=4000, **overrides)


CASES = [("gpt", setting) for setting in SETTINGS] + [("delta-net", "plain"), ("delta-net", "one-draft")]


@pytest.mark.parametrize(("kind", "setting"), CASES)
@pytest.mark.parametrize("rule", ["rejection", "target-only"])
def test_sampled_text_is_distributed_as_the_targets_own(small, rule, kind, setting):
    assert abs(_surprise(small[kind], _config(rule, **SETTINGS[setting]))) < 3.5


def _wrong_temperature(target_probs, draft_probs, *args, **kwargs):
    # as if the temperature of the drafts had been forgotten
    return verify(target_probs, draft_probs.pow(0.7) / draft_probs.pow(0.7).sum(-1, True), *args, **kwargs)


def _planted(fault):
    def wrong(target_probs, draft_probs, tokens, rule, *, generator):
        out = textbook(target_probs, draft_probs, tokens, rule, None, generator, fault)
        nothing = torch.zeros(tokens.shape)
        return type(out)(out.num_accepted, out.tokens, nothing, nothing)

    return wrong


FAULTS = {
    "draft probabilities of another temperature": _wrong_temperature,
    "bonus token from the last draft's position": _planted("bonus of the last draft"),
    "same token, so accept": _planted("first choice accepted"),
    "recovered token may be the rejected one": _planted("recovers from p"),
}


# target-only has no draft probabilities
FAULTY = [("gpt", "rejection", fault) for fault in FAULTS] + [("gpt", "target-only", fault) for fault in [*FAULTS][1:]]
FAULTY += [("delta-net", "rejection", fault) for fault in [*FAULTS][:2]]


@pytest.mark.parametrize(("kind", "rule", "fault"), FAULTY)
def test_the_test_notices_a_planted_fault(small, monkeypatch, kind, rule, fault):
    monkeypatch.setattr(decode, "verify", FAULTS[fault])
    assert _surprise(small[kind], _config(rule, gamma=1)) > 6


def test_the_textbook_that_the_faults_are_planted_in_passes(small, monkeypatch):
    monkeypatch.setattr(decode, "verify", _planted(None))
    assert abs(_surprise(small["gpt"], _config("rejection", gamma=1))) < 3.5


# kind of model, rule, temperature, gamma, and what else is set
STATEMENT_CASES = [
    ("gpt", "rejection", 0.9, 3, {}),
    ("gpt", "target-only", 0.9, 3, {}),
    ("gpt", "rejection", 0.6, 5, {}),
    ("gpt", "target-only", 1.3, 1, {}),
    ("gpt", "rejection", 1.0, 4, {"adaptive_gamma": True, "draft_cost": 0.4}),
    ("gpt", "rejection", 1.0, 3, {"attention": "first-depth"}),
    ("delta-net", "rejection", 0.9, 3, {}),
    ("delta-net", "target-only", 0.7, 5, {}),
    ("delta-net", "rejection", 1.3, 1, {}),
]


@pytest.mark.parametrize(("kind", "rule", "temperature", "gamma", "more"), STATEMENT_CASES)
def test_accepted_drafts_follow_probabilities_that_a_full_forward_confirms(kind, rule, temperature, gamma, more):
    model = tiny.build(vocab_size=8, sharpness=0.2, seed=2, **MODELS[kind])
    sampling = {"temperature": temperature, "max_new_tokens": 40, "batch_size": 400, "record": True}
    config = DecodeConfig(rule=rule, gamma=gamma, **sampling, **more)
    prompts = tiny.prompts(*[3] * 400, vocab_size=8)
    result = SpeculativeDecoder(model, config, vocab_size=8).generate(prompts)
    records = result.records
    assert records is not None

    # the sum of (accepted - probability) over all steps reached is zero within its standard error
    for step in range(1, gamma + 1):
        here = records.step == step
        for probability in (records.accept_prob[here].double(), records.alpha[here].double()):
            error = (probability * (1 - probability)).sum().sqrt()
            assert step > 1 or error > 3
            # the last of five steps may be reached too seldom to be told from normal
            assert error < 1 or abs((records.accepted[here].double() - probability).sum() / error) < 3, step

    checked = 0
    for index in (records.sequence < 2).nonzero()[:, 0].tolist():
        sequence, anchor, step = (int(x[index]) for x in (records.sequence, records.anchor, records.step))
        text = prompts[sequence] + result.sequences[sequence].tokens
        # drafts behind the length limit are not in the text
        if anchor + step >= len(text):
            continue
        drafts = [*text[anchor + 2 : anchor + 1 + step], int(records.token[index])]
        attention = config.attention
        q = tiny.draft_logits(model, text[: anchor + 2], drafts, attention).div(temperature).softmax(-1)[-1]
        p = tiny.full_logits(model, text[: anchor + step + 1])[-1].div(temperature).softmax(-1)
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
    assert checked > 30


@pytest.mark.parametrize("adaptive", [False, True])
def test_counts_are_the_records_summed(adaptive):
    model = tiny.build(sharpness=0.2, seed=2)
    config = DecodeConfig(max_new_tokens=30, batch_size=4, record=True, adaptive_gamma=adaptive)
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
    drafted = result.counts[:, :, DRAFTED].sum(0)
    assert result.accept_rate == pytest.approx(float(accepted.sum() / drafted.sum()))
    if adaptive:
        assert drafted[0] == first.sum() > drafted[2] > 0
    else:
        assert drafted.tolist() == [first.sum()] * 3
    assert result.mean_gamma == pytest.approx(float(drafted.sum() / first.sum()))
    assert result.rate_per_step[1] <= result.conditional_rate_per_step[1]
    # every verification yields its accepted drafts and one token; what exceeds the limit is cut off
    produced = int(accepted.sum()) + result.num_verifications + len(result.sequences)
    assert result.num_tokens <= produced < result.num_tokens + 3 * len(result.sequences) + 1
