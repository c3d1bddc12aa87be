"""Rows of a batch do not influence each other, end where they should, and are replaced without a trace.

Catches: a finished row that goes on, a new row that sees the old one's keys, a moved row that loses state, a
stop token inside accepted drafts that is overlooked, a batch that waits for its slowest row.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bebop_megatron.evaluation import DecodeConfig, GenerationResult, SpeculativeDecoder
from tests.evaluation import tiny

pytestmark = pytest.mark.usefixtures("megatron")
PROMPTS = (5, 1, 9, 17, 4, 4, 12, 2, 7, 3)


@pytest.fixture(scope="module")
def model(megatron):
    return tiny.build()


def generate(model, config, **kwargs) -> GenerationResult:
    decoder = SpeculativeDecoder(model, config, vocab_size=tiny.VOCAB)
    return decoder.generate(kwargs.pop("prompts", tiny.prompts(*PROMPTS)), **kwargs)


@pytest.fixture(scope="module")
def greedy(model):
    return greedy_texts(model)


def greedy_texts(model, lengths=PROMPTS, tokens=20):
    """Greedy text, one full forward pass per token."""
    texts = []
    for prompt in tiny.prompts(*lengths):
        text = list(prompt)
        for _ in range(tokens):
            text.append(int(tiny.full_logits(model, text)[-1].argmax()))
        texts.append(text[len(prompt) :])
    return texts


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("rule", "gamma", "attention"),
    [
        ("rejection", 0, "chain"),
        ("rejection", 1, "chain"),
        ("rejection", 3, "chain"),
        ("target-only", 3, "chain"),
        ("target-only", 5, "first-depth"),
    ],
)
def test_greedy_text_is_that_of_full_forward_passes(model, greedy, rule, gamma, attention, batch_size):
    config = DecodeConfig(
        rule=rule,
        gamma=gamma,
        attention=attention,
        temperature=0,
        max_new_tokens=20,
        batch_size=batch_size,
        prefill_chunk=6,
    )
    result = generate(model, config)
    assert [sequence.tokens for sequence in result.sequences] == greedy
    assert [sequence.prompt for sequence in result.sequences] == list(range(len(PROMPTS)))
    assert all(log_prob == 0 for sequence in result.sequences for log_prob in sequence.log_probs)


@pytest.mark.parametrize("kind", tiny.DELTA_NETS)
def test_greedy_text_of_recurrent_models_is_that_of_full_forward_passes(kind):
    model = tiny.build(**tiny.DELTA_NETS[kind])
    lengths = (5, 1, 14, 4, 2)
    expected = greedy_texts(model, lengths, 14)
    # rows move, new ones take the place of finished ones, drafts are rejected; the longest prompt has three chunks
    for changes in ({}, {"gamma": 0}, {"gamma": 5, "adaptive_gamma": True}, {"gamma": 6, "prefill_chunk": 1}):
        config = DecodeConfig(**{"temperature": 0, "max_new_tokens": 14, "batch_size": 2, "prefill_chunk": 6} | changes)
        result = generate(model, config, prompts=tiny.prompts(*lengths))
        assert [sequence.tokens for sequence in result.sequences] == expected, changes


def test_adaptive_gamma_changes_how_much_is_drafted_and_no_text(model, greedy):
    gammas = {}
    for cost in (0.0, 0.2, 5.0):
        config = DecodeConfig(
            gamma=5, adaptive_gamma=True, draft_cost=cost, temperature=0, max_new_tokens=20, batch_size=3
        )
        result = generate(model, config)
        assert [sequence.tokens for sequence in result.sequences] == greedy
        gammas[cost] = result.mean_gamma
    assert gammas[0.0] == 5 > gammas[0.2] > gammas[5.0] >= 1


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_text_ends_with_the_first_stop_token(model, greedy, gamma, batch_size):
    stop = (greedy[0][6], greedy[3][2])
    config = DecodeConfig(gamma=gamma, temperature=0, max_new_tokens=20, batch_size=batch_size, stop_tokens=stop)
    result = generate(model, config)
    lengths = set()
    for sequence, full in zip(result.sequences, greedy, strict=True):
        ends = [place for place, token in enumerate(full) if token in stop]
        assert sequence.tokens == full[: ends[0] + 1 if ends else 20]
        assert len(sequence.log_probs) == len(sequence.tokens)
        assert sequence.finish == ("stop" if ends else "length")
        lengths.add(len(sequence.tokens))
    assert len(lengths) > 2


def test_a_stop_token_among_accepted_drafts_ends_the_text():
    # flat distributions: many drafts are accepted
    model = tiny.build(sharpness=0.1)
    config = DecodeConfig(max_new_tokens=30, seed=5, record=True)
    whole = generate(model, config, prompts=tiny.prompts(4))
    text, records = whole.sequences[0].tokens, whole.records
    # accepted drafts with another accepted draft behind them, as places in the continuation
    inner = records.accepted & records.accepted.roll(-1) & (records.step.roll(-1) == records.step + 1)
    places = [place for place in (records.anchor + records.step + 1 - 4)[inner].tolist() if place < len(text)]
    stops = {text[place] for place in places if text.index(text[place]) == place}
    assert len(stops) >= 2
    for stop in stops:
        cut = generate(model, replace(config, stop_tokens=(stop,)), prompts=tiny.prompts(4)).sequences[0]
        assert cut.tokens == text[: text.index(stop) + 1]
        assert cut.finish == "stop"


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_no_text_is_longer_than_asked_for(model, max_new_tokens):
    result = generate(model, DecodeConfig(max_new_tokens=max_new_tokens, batch_size=3))
    assert [len(sequence.tokens) for sequence in result.sequences] == [max_new_tokens] * len(PROMPTS)


def test_same_seed_same_text_other_seed_other_text(model):
    texts = [
        [s.tokens for s in generate(model, DecodeConfig(max_new_tokens=12, batch_size=4, seed=seed)).sequences]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_num_tokens_takes_prompts_in_turn_until_there_are_enough(model):
    told = []
    config = DecodeConfig(max_new_tokens=10, batch_size=4)
    result = generate(model, config, prompts=tiny.prompts(3, 5), num_tokens=95, progress=told.append)
    assert result.num_tokens == 100
    assert [sequence.prompt for sequence in result.sequences] == [0, 1] * 5
    assert told == sorted(told)
    assert told[-1] == 100
    # sequences of one prompt are independent samples
    assert len({tuple(sequence.tokens) for sequence in result.sequences}) > 5


def test_no_row_waits_for_a_longer_one(model):
    told: list[int] = []
    config = DecodeConfig(gamma=0, max_new_tokens=60, batch_size=2, stop_tokens=(0, 1, 2))
    result = generate(model, config, prompts=tiny.prompts(*[3] * 20), progress=told.append)
    # the first token comes from the prompt
    lengths = [len(sequence.tokens) - 1 for sequence in result.sequences]
    pair_by_pair = sum(max(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True))
    assert len(told) <= sum(lengths) / 2 + max(lengths) / 2
    assert len(told) < 0.9 * pair_by_pair


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, tiny.VOCAB]], "prompt 0 holds ids outside the vocabulary of 32"),
        ([[1, -1]], "outside the vocabulary"),
        ([[1] * 90], r"90 tokens and max_new_tokens=8 \(gamma=3\) need 98 positions, but the model has 96"),
    ],
)
def test_bad_prompts_are_refused(model, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(model, DecodeConfig(max_new_tokens=8), prompts=prompts)


def test_the_last_positions_of_the_model_can_be_used(model):
    result = generate(model, DecodeConfig(max_new_tokens=6), prompts=tiny.prompts(90))
    assert result.num_tokens == 6
    learned = tiny.build(position="learned_absolute")
    assert generate(learned, DecodeConfig(max_new_tokens=6), prompts=tiny.prompts(87)).num_tokens == 6
    with pytest.raises(ValueError, match="need 97 positions"):
        generate(learned, DecodeConfig(max_new_tokens=6), prompts=tiny.prompts(88))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "exact"}, "choose one of rejection, target-only"),
        ({"attention": "per-depth"}, "not a way to decode"),
        ({"attention": "flash"}, "choose one of chain, first-depth"),
        ({"gamma": -1}, "gamma must be at least 0, got -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"temperature": -0.5}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\], got 0"),
        ({"adaptive_gamma": True, "gamma": 0}, "adaptive_gamma chooses from 1 to gamma drafts"),
        ({"draft_cost": -1}, "draft_cost must be a number of at least 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**settings)


def test_vocabulary_larger_than_the_model_is_refused(model):
    with pytest.raises(ValueError, match="vocab_size is 33, but the model has 32 columns"):
        SpeculativeDecoder(model, DecodeConfig(), vocab_size=33)


def test_standard_error_takes_sequences_as_units():
    counts = torch.zeros(4, 1, 5, dtype=torch.float64)
    counts[:, 0, 0], counts[:, 0, 1] = 10, torch.tensor([10.0, 10.0, 0.0, 0.0])
    result = GenerationResult(sequences=[], counts=counts, seconds=1.0)
    # four independent values 1, 1, 0, 0 of a mean, not forty
    assert result.accept_length == 1.5
    assert result.accept_length_error == pytest.approx((1 / 3) ** 0.5 / 2)


def test_without_drafts_there_is_no_acceptance(model):
    result = generate(model, DecodeConfig(gamma=0, max_new_tokens=2), prompts=tiny.prompts(3, 4))
    assert (result.accept_length, result.num_verifications, result.mean_gamma) == (1, 0, 0)
    assert math.isnan(result.accept_rate)
    assert math.isnan(result.accept_length_error)
