"""Verification leaves the target's distribution as it is, and the test that says so can tell.

Caught here: a bonus token from the last draft's position instead of the one after it; q of another
temperature than the draft was drawn with; "equals the target's first choice, so accept" in a sampling row;
recovering from p instead of the residual; NaN from an empty residual or a zero q; tokens of rows with fewer
drafts; one-hot targets that round.

Everything is judged by one chi-square test over the joint law of the first three tokens of a small Markov
chain. The wrong verifiers must fail that same test at the same sample size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bebop_megatron.evaluation.filters import filtered_probs, sample
from bebop_megatron.evaluation.verify import RULES, Verification, verify

SAMPLES = 200_000
GAMMA = 2
# fixed seeds make every p-value reproducible; these bounds say how far apart right and wrong are
LOSSLESS, BIASED = 1e-3, 1e-12
Verifier = Callable[..., Verification]


@dataclass(frozen=True)
class Chain:
    """A target and a draft model whose next token depends on the last: first [v], then [v, v]; float64
    rows."""

    target_first: Tensor
    target_next: Tensor
    draft_first: Tensor
    draft_next: Tensor

    @property
    def law(self) -> Tensor:
        """Joint law [v, v, v] of the target's first three tokens."""
        pair = self.target_first[:, None] * self.target_next
        return pair[:, :, None] * self.target_next[None]


def make_chain(kind: str, v: int = 4, seed: int = 0) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(v + 1, v, generator=generator, dtype=torch.float64)
    draft = target + torch.randn(v + 1, v, generator=generator, dtype=torch.float64)
    if kind == "top-p":
        p, q = filtered_probs(target, 0.8, top_p=0.9), filtered_probs(draft, 1.2, top_k=3)
        assert (p == 0).any()
        assert (q == 0).any()
    else:
        p, q = target.softmax(-1), draft.softmax(-1)
    if kind == "zeros":
        # impossible for the target, for the draft, and for both
        p[0, 0] = p[2, 1] = q[0, 1] = q[1, 0] = p[3, 3] = q[3, 3] = 0
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return Chain(p[0], p[1:], q[0], q[1:])


def decode(
    chain: Chain,
    rule: str,
    verifier: Verifier,
    num_drafts: Tensor | None = None,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Verification]:
    """Three tokens per row: one verification, then plain sampling where it gave fewer: [SAMPLES, 3]."""
    generator = torch.Generator().manual_seed(seed)
    first = chain.draft_first.to(dtype).expand(SAMPLES, -1)
    y1 = sample(first, generator) if rule == "rejection" else first.argmax(-1)
    second = chain.draft_next.to(dtype)[y1]
    y2 = sample(second, generator) if rule == "rejection" else second.argmax(-1)
    rows = chain.target_next.to(dtype)
    target = torch.stack([chain.target_first.to(dtype).expand(SAMPLES, -1), rows[y1], rows[y2]], dim=1)
    draft, drafts = torch.stack([first, second], dim=1), torch.stack([y1, y2], dim=1)
    out = verifier(target, draft, drafts, rule, num_drafts, generator)
    tokens = out.tokens.clone()
    for i in (1, 2):
        missing = tokens[:, i] < 0
        tokens[missing, i] = sample(chain.target_next[tokens[missing, i - 1]], generator)
    return tokens, out


def p_value(tokens: Tensor, law: Tensor) -> float:
    """Chi-square test of the rows of `tokens` against the joint law; 0 if an impossible outcome was seen."""
    v = law.shape[0]
    counts = torch.bincount((tokens[:, 0] * v + tokens[:, 1]) * v + tokens[:, 2], minlength=v**3).double()
    expected = law.flatten() * len(tokens)
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < 10
    keep = expected[~rare], counts[~rare]
    expected = torch.cat([keep[0], expected[rare].sum()[None]])
    counts = torch.cat([keep[1], counts[rare].sum()[None]])
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = torch.tensor(float(used.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def textbook(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    rule: str,
    num_drafts: Tensor | None,
    generator: torch.Generator,
    fault: str | None = None,
) -> Verification:
    """Verification step by step, with a fault built in on request."""
    b, gamma = tokens.shape
    alive = torch.ones(b, dtype=torch.bool)
    out = torch.full((b, gamma + 1), -1)
    rows = torch.arange(b)
    for i in range(gamma):
        y = tokens[:, i]
        p = target[:, i].double()
        q = draft[:, i].double() if rule == "rejection" else torch.nn.functional.one_hot(y, p.shape[1]).double()
        accept = p[rows, y] / q[rows, y]
        if fault == "first choice accepted":
            accept = torch.where(y == p.argmax(-1), 1.0, accept)
        ok = torch.rand(b, generator=generator) < accept
        residual = p if fault == "recovers from p" else (p - q).clamp(min=0)
        residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, p)
        out[:, i] = torch.where(alive, torch.where(ok, y, sample(residual, generator)), out[:, i])
        alive &= ok
    bonus = target[:, gamma - 1 if fault == "bonus of the last draft" else gamma]
    out[:, gamma] = torch.where(alive, sample(bonus, generator), -1)
    empty = torch.zeros(b, gamma)
    return Verification((out >= 0).sum(1) - 1, out, empty, empty)


def cold_drafts(target: Tensor, draft: Tensor, *rest) -> Verification:
    """Verifies with the q of another temperature than the drafts were drawn with."""
    sharper = draft**1.5
    return verify(target, sharper / sharper.sum(-1, keepdim=True), *rest)


def early_bonus(target: Tensor, *rest) -> Verification:
    """Draws the bonus token from the distribution of the last draft's position."""
    return verify(torch.cat([target[:, :GAMMA], target[:, GAMMA - 1 : GAMMA]], dim=1), *rest)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["random", "zeros", "top-p"])
@pytest.mark.parametrize("drafts", ["all", "mixed"])
def test_verification_keeps_the_joint_law_of_three_tokens(rule, kind, drafts):
    chain = make_chain(kind)
    num_drafts = torch.arange(SAMPLES) % (GAMMA + 1) if drafts == "mixed" else None
    tokens, out = decode(chain, rule, verify, num_drafts)
    assert p_value(tokens, chain.law) > LOSSLESS
    # every outcome is exercised, or the test would prove little
    assert set(out.num_accepted.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("rule", RULES)
def test_the_textbook_verifier_passes_the_test_that_its_faulty_versions_fail(rule):
    tokens, _ = decode(make_chain("random"), rule, textbook)
    assert p_value(tokens, make_chain("random").law) > LOSSLESS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", ["bonus of the last draft", "first choice accepted", "recovers from p"])
def test_a_faulty_verifier_fails_the_test(rule, fault):
    chain = make_chain("random")
    tokens, _ = decode(chain, rule, lambda *inputs: textbook(*inputs, fault=fault))
    assert p_value(tokens, chain.law) < BIASED


@pytest.mark.parametrize(
    ("verifier", "rule"),
    [(cold_drafts, "rejection"), (early_bonus, "rejection"), (early_bonus, "target-only")],
)
def test_verify_fed_the_wrong_distribution_fails_the_test(verifier, rule):
    chain = make_chain("random")
    tokens, _ = decode(chain, rule, verifier)
    assert p_value(tokens, chain.law) < BIASED


def test_target_only_drafts_under_the_rejection_rule_fail_the_test():
    """Greedy drafts handed over with the softmax q that they were not drawn from."""
    chain = make_chain("random")
    tokens, _ = decode(chain, "target-only", lambda p, q, y, _rule, *rest: verify(p, q, y, "rejection", *rest))
    assert p_value(tokens, chain.law) < BIASED


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_of_each_step_is_what_alpha_and_accept_prob_say(rule):
    chain = make_chain("random")
    _, out = decode(chain, rule, verify)
    for i in range(GAMMA):
        reached = out.num_accepted >= i
        accepted = (out.num_accepted > i)[reached].double()
        for claimed in (out.alpha[reached, i].double(), out.accept_prob[reached, i].double()):
            excess = accepted - claimed
            assert abs(excess.mean()) < 4 * excess.std() / len(excess) ** 0.5
    p, q = chain.target_first, chain.draft_first
    first = torch.minimum(p, q).sum() if rule == "rejection" else p[q.argmax()]
    torch.testing.assert_close(out.alpha[0, 0].double(), first, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_always_accept(dtype):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(5000, 4, 50, generator=generator, dtype=dtype).mul(3).softmax(-1)
    out = verify(p, p[:, :3], sample(p[:, :3], generator), generator=generator, validate=True)
    assert (out.num_accepted == 3).all()
    assert (out.accept_prob == 1).all()
    assert out.alpha.dtype == dtype


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_certain_outcomes_hold_at_either_end_of_the_random_numbers(uniform, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, uniform, dtype=torch.float64))
    p, y = torch.tensor([[[0.3, 0.7, 0.0]] * 2]), torch.tensor([[1]])
    for rule, draft, drafts, accepted in (
        ("rejection", p, y, 1),
        ("rejection", p.flip(2), y + 1, 0),
        ("target-only", p, y + 1, 0),
    ):
        assert verify(p, draft[:, :1], drafts, rule).num_accepted.item() == accepted


def test_disjoint_support_never_accepts_and_recovers_from_the_target():
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.25, 0.75, 0.0, 0.0]).expand(20_000, 3, 4)
    q = torch.tensor([0.0, 0.0, 0.5, 0.5]).expand(20_000, 2, 4)
    out = verify(p, q, sample(q, generator), generator=generator)
    assert (out.num_accepted == 0).all()
    assert (out.alpha == 0).all()
    assert abs((out.tokens[:, 0] == 1).double().mean() - 0.75) < 4 * (0.75 * 0.25 / 20_000) ** 0.5
    assert out.tokens[:, 0].max() == 1


@pytest.mark.parametrize("rule", RULES)
def test_one_hot_target_yields_exactly_its_own_tokens(rule):
    generator = torch.Generator().manual_seed(0)
    b, gamma, v = 4000, 3, 6
    p = filtered_probs(torch.randn(b, gamma + 1, v, generator=generator), 0.0)
    q = torch.randn(b, gamma, v, generator=generator).softmax(-1)
    # half of the rows draft with certainty too
    q[::2] = filtered_probs(q[::2], 0.0)
    drafts = sample(q, generator)
    out = verify(p, q, drafts, rule, generator=generator)
    agree = (drafts == p[:, :gamma].argmax(-1)).long().cumprod(1).sum(1)
    assert torch.equal(out.num_accepted, agree)
    emitted = out.tokens >= 0
    assert torch.equal(out.tokens[emitted], p.argmax(-1)[emitted])


@pytest.mark.parametrize("rule", RULES)
def test_output_is_accepted_drafts_then_one_token_then_minus_one(rule):
    generator = torch.Generator().manual_seed(0)
    b, gamma, v = 2000, 3, 5
    p = torch.randn(b, gamma + 1, v, generator=generator).softmax(-1)
    q = torch.randn(b, gamma, v, generator=generator).softmax(-1)
    drafts = sample(q, generator)
    num_drafts = torch.arange(b) % (gamma + 1)
    # what lies past num_drafts is not read
    past = torch.arange(gamma) >= num_drafts[:, None]
    q[past], drafts[past] = torch.nan, -7
    p[torch.arange(gamma + 1) > num_drafts[:, None]] = torch.nan
    out = verify(p, q, drafts, rule, num_drafts, generator, validate=True)
    for row, (length, tokens) in enumerate(zip(out.num_accepted.tolist(), out.tokens.tolist(), strict=True)):
        assert length <= num_drafts[row]
        assert tokens[:length] == drafts[row, :length].tolist()
        assert 0 <= tokens[length] < v
        assert tokens[length + 1 :] == [-1] * (gamma - length)
        if length < num_drafts[row]:
            assert out.accept_prob[row, length] < 1
            if rule == "target-only":
                assert tokens[length] != drafts[row, length]
    for field in (out.accept_prob, out.alpha):
        assert (field[past] == 0).all()
        assert ((field >= 0) & (field <= 1)).all()


@pytest.mark.parametrize("rule", RULES)
def test_no_drafts_yield_one_token_of_the_target(rule):
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.1, 0.2, 0.7])
    out = verify(
        p.expand(20_000, 1, 3),
        torch.empty(20_000, 0, 3),
        torch.empty(20_000, 0).long(),
        rule,
        generator=generator,
    )
    assert out.tokens.shape == (20_000, 1)
    share = torch.bincount(out.tokens[:, 0], minlength=3) / 20_000
    assert (abs(share - p) < 4 * (p * (1 - p) / 20_000) ** 0.5).all()


def test_rounding_that_leaves_no_residual_falls_back_to_the_target():
    """q exceeds p everywhere: a rejected draft has nothing left to recover from."""
    p = torch.tensor([0.5, 0.25, 0.0]).expand(4000, 2, 3)
    q = torch.tensor([1.0, 0.5, 0.5]).expand(4000, 1, 3)
    out = verify(p, q, torch.zeros(4000, 1).long(), generator=torch.Generator().manual_seed(0))
    recovered = out.tokens[out.num_accepted == 0, 0]
    assert set(recovered.tolist()) == {0, 1}
    # a target that is certain of the draft, by target-only: its residual is empty as well
    certain = torch.tensor([1.0, 0.0]).expand(100, 2, 2)
    out = verify(certain, None, torch.zeros(100, 1).long(), "target-only")
    assert (out.tokens == 0).all()


def test_a_draft_that_q_excludes_is_handled_and_reported():
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 2])
    q = torch.tensor([[[0.0, 1.0, 0.0]]])
    for token, accepted in ((0, 1), (2, 0)):
        out = verify(p, q, torch.tensor([[token]]))
        assert out.num_accepted.item() == accepted
        assert out.accept_prob.item() == accepted
        with pytest.raises(ValueError, match="was not drawn from them"):
            verify(p, q, torch.tensor([[token]]), validate=True)


def test_bfloat16_distributions_are_judged_in_float32():
    p = torch.rand(8, 3, 5).softmax(-1).bfloat16()
    out = verify(p, p[:, :2], torch.zeros(8, 2).long())
    assert out.alpha.dtype == torch.float32


def test_a_seed_fixes_the_outcome():
    p = torch.rand(64, 4, 9, generator=torch.Generator().manual_seed(0)).mul(4).softmax(-1)
    runs = [
        verify(p, p[:, 1:], torch.zeros(64, 3).long(), generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    ]
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    assert not torch.equal(runs[0].tokens, runs[2].tokens)


def test_inputs_are_left_alone():
    p, q = torch.rand(4, 3, 5).softmax(-1), torch.rand(4, 2, 5).softmax(-1)
    drafts = torch.tensor([[0, 1]] * 4)
    before = [x.clone() for x in (p, q, drafts)]
    for rule in RULES:
        verify(p, q, drafts, rule, torch.tensor([0, 1, 2, 2]))
    assert all(torch.equal(x, y) for x, y in zip((p, q, drafts), before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "typical"}, "choose one of rejection, target-only"),
        ({"draft_probs": None}, "needs draft_probs"),
        ({"draft_probs": torch.rand(2, 2, 5)}, r"draft_probs must be \[2, 2, 4\]"),
        ({"target_probs": torch.rand(2, 2, 4)}, "bonus"),
        ({"draft_tokens": torch.zeros(2).long()}, "verify takes"),
        ({"num_drafts": torch.zeros(3).long()}, r"num_drafts must be \[2\]"),
        ({"num_drafts": torch.tensor([0, 3]), "validate": True}, "0..2"),
        ({"draft_tokens": torch.full((2, 2), 4), "validate": True}, "outside 0..3"),
        ({"target_probs": torch.ones(2, 3, 4), "validate": True}, "no distributions"),
        ({"draft_probs": torch.full((2, 2, 4), torch.nan), "validate": True}, "no distributions"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    inputs = {
        "target_probs": torch.full((2, 3, 4), 0.25),
        "draft_probs": torch.full((2, 2, 4), 0.25),
        "draft_tokens": torch.zeros(2, 2).long(),
    }
    with pytest.raises(ValueError, match=message):
        verify(**(inputs | change))
