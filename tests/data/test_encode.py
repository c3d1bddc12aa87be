"""Tokens and mask of every kind of document.

Catches: prompt tokens trained on, a mask one token early or late, an end of turn that is never taught, white space
of the template taken for the assistant's, a token that straddles prompt and answer, a template that rewrites
earlier turns trusted blindly.
"""

from __future__ import annotations

from itertools import groupby

import pytest

from bebop_megatron.data.documents import Chat, Completion, Text
from bebop_megatron.data.encode import encode

USER, ASSISTANT = ({"role": role, "content": role} for role in ("user", "assistant"))
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?\n"},
    {"role": "assistant", "content": "\n yes, 4 \n"},
]

PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# the end of turn is the end of sequence; none behind the last turn's prompt
EOS_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}"
)
OPEN_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' }}{{ m.content }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"
)
# as the templates of reasoning models: only the last answer shows its thoughts
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.last and m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def runs(document, tokenizer):
    """The document decoded, as (text, is_target) for every run of equal mask; checks what holds for all."""
    (encoded,) = encode([document], tokenizer)
    assert encoded.tokens.shape == encoded.mask.shape
    assert encoded.tokens[-1] == tokenizer.eos_token_id
    assert set(encoded.mask.tolist()) <= {0, 1}
    pairs = zip(encoded.tokens.tolist(), encoded.mask.tolist(), strict=True)
    return [
        (tokenizer.decode([token for token, _ in run]), bool(target))
        for target, run in groupby(pairs, key=lambda pair: pair[1])
    ]


def chat(messages=MESSAGES):
    return Chat(messages, None, "file, line 7")


def test_every_token_of_a_text_is_a_target(tokenizer):
    assert runs(Text("a b\n", "here"), tokenizer) == [("a b\n<|endoftext|>", True)]


def test_only_the_completion_and_the_end_are_targets(tokenizer):
    assert runs(Completion("1+1", "=2", "here"), tokenizer) == [("1+1", False), ("=2<|endoftext|>", True)]
    assert runs(Completion("", "all", "here"), tokenizer) == [("all<|endoftext|>", True)]


def test_no_token_straddles_prompt_and_completion(tokenizer):
    word = max((token for token in tokenizer.get_vocab() if token.isalpha() and token.isascii()), key=len)
    assert len(tokenizer(word)["input_ids"]) == 1
    assert runs(Completion(word[:2], word[2:], "here"), tokenizer) == [
        (word[:2], False),
        (word[2:] + "<|endoftext|>", True),
    ]


CHATML_RUNS = [
    ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False),
    ("4<|im_end|>", True),
    ("\n<|im_start|>user\nsure?\n<|im_end|>\n<|im_start|>assistant\n", False),
    ("\n yes, 4 \n<|im_end|>", True),
    ("\n<|endoftext|>", False),
]


def test_generation_blocks_of_the_template_are_the_targets(tokenizer):
    assert "{% generation %}" in tokenizer.chat_template
    assert runs(chat(), tokenizer) == CHATML_RUNS


def test_prefixes_find_the_same_targets_without_generation_blocks(tokenizer):
    tokenizer.chat_template = PLAIN_CHATML
    assert runs(chat(), tokenizer) == CHATML_RUNS


def test_the_tokens_and_mask_are_those_of_transformers(tokenizer):
    messages = [*MESSAGES[:4], {"role": "assistant", "content": "yes, 4"}]
    (encoded,) = encode([chat(messages)], tokenizer)
    expected = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.tokens.tolist() == [*expected["input_ids"], tokenizer.eos_token_id]
    assert encoded.mask.tolist() == [*expected["assistant_masks"], 0]


def test_an_end_of_turn_that_is_the_end_of_sequence_is_not_doubled(tokenizer):
    tokenizer.chat_template = EOS_TEMPLATE
    assert runs(chat([*MESSAGES[1:4], ASSISTANT]), tokenizer) == [
        ("[2+2?]", False),
        (" 4<|endoftext|>", True),
        ("[sure?\n]", False),
        (" assistant<|endoftext|>", True),
    ]


def test_an_answer_without_end_of_turn_is_taught_to_end(tokenizer):
    tokenizer.chat_template = OPEN_TEMPLATE
    assert runs(chat([USER, ASSISTANT]), tokenizer) == [
        ("user:user\nassistant:", False),
        ("assistant<|endoftext|>", True),
    ]


def test_a_conversation_that_ends_with_the_user_ends_without_target(tokenizer):
    for template in (tokenizer.chat_template, PLAIN_CHATML):
        tokenizer.chat_template = template
        assert runs(chat([USER, ASSISTANT, USER]), tokenizer)[-2:] == [
            ("assistant<|im_end|>", True),
            ("\n<|im_start|>user\nuser<|im_end|>\n<|endoftext|>", False),
        ]


def test_consecutive_answers_are_both_targets(tokenizer):
    tokenizer.chat_template = PLAIN_CHATML
    assert [text for text, kept in runs(chat([USER, ASSISTANT, ASSISTANT]), tokenizer) if kept] == [
        "assistant<|im_end|>",
        "assistant<|im_end|>",
    ]


def test_thoughts_shown_in_the_last_answer_only_are_refused_over_several_turns(tokenizer):
    tokenizer.chat_template = THINKING_TEMPLATE
    assert runs(chat([USER, ASSISTANT]), tokenizer)[1] == ("<think>\n\n</think>\n\nassistant<|im_end|>", True)
    with pytest.raises(ValueError, match=r"file, line 7: .* message 3, the assistant's.*generation"):
        runs(chat(), tokenizer)


def test_a_chat_that_cannot_be_rendered_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"file, line 7: .* cannot render"):
        runs(chat([USER, {"role": "assistant", "content": None}]), tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"file, line 7: .* cannot render.*no system role"):
        runs(chat(), tokenizer)
    tokenizer.chat_template = "{% generation %}{% endgeneration %}"
    with pytest.raises(ValueError, match=r"file, line 7: .*nothing of this conversation to the assistant"):
        runs(chat(), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"file, line 7 .*no chat template"):
        runs(chat(), tokenizer)


def test_an_added_token_of_spaces_ends_no_turn(tokenizer):
    tokenizer.add_tokens(["  "])
    tokenizer.chat_template = OPEN_TEMPLATE
    assert runs(chat([USER, {"role": "assistant", "content": "so  "}]), tokenizer)[-1] == ("so  <|endoftext|>", True)


def test_tools_reach_the_template(tokenizer):
    tokenizer.chat_template = "{% if tools %}{{ tools[0].name }} {% endif %}" + PLAIN_CHATML
    document = Chat([USER, ASSISTANT], [{"name": "calculator"}], "here")
    assert runs(document, tokenizer)[0][0].startswith("calculator <|im_start|>user")


def test_a_beginning_of_sequence_that_the_tokenizer_adds_is_kept_but_not_in_chats(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
    )
    assert runs(Text("a", "here"), tokenizer) == [("<|im_start|>a<|endoftext|>", True)]
    assert runs(Completion("a", "b", "here"), tokenizer)[0] == ("<|im_start|>a", False)
    assert runs(chat(), tokenizer) == CHATML_RUNS


def test_a_tokenizer_that_adds_a_space_to_every_piece_is_refused_for_prompts(tokenizer):
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert runs(Text("a", "here"), tokenizer) == [(" a<|endoftext|>", True)]
    with pytest.raises(ValueError, match="tokenised apart, into ' left right'"):
        runs(Completion("a", "b", "here"), tokenizer)


def test_batches_keep_the_order(tokenizer):
    documents = [Completion(f"{i}", f"={i}", "here") if i % 2 else Text(f"{i}", "here") for i in range(600)]
    for number, encoded in enumerate(encode(documents, tokenizer)):
        alone = next(encode([documents[number]], tokenizer)) if number % 97 == 0 else None
        assert encoded.document is documents[number]
        assert tokenizer.decode(encoded.tokens).startswith(f"{number}")
        if alone:
            assert (encoded.tokens.tolist(), encoded.mask.tolist()) == (alone.tokens.tolist(), alone.mask.tolist())
