"""Cuts a document into segments: text that is wholly a training target, or wholly not.

A chat goes through the tokenizer's own template. Where the template marks the assistant's words with
`{% generation %}`, these marks count; otherwise the conversation is rendered up to each assistant turn and
through it, and the difference counts, without white space behind the token that ends the turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bebop_megatron.data.documents import Chat, Completion, Document, Text

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Segment:
    """Text of which every token is a target, or none is."""

    text: str
    is_target: bool


class Segmenter:
    """Cuts documents, the chats among them with this tokenizer's template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokens = map(str, tokenizer.added_tokens_decoder.values())
        # some tokenizers add runs of spaces, which end no turn
        self._added_tokens = tuple(token for token in tokens if token.strip())

    def __call__(self, document: Document) -> list[Segment]:
        """The document's segments in order, none of them empty; their texts joined are the whole text.

        Raises:
            ValueError: a chat that the template cannot render, or whose turns cannot be told apart.
        """
        match document:
            case Text(text):
                cut = [Segment(text, True)]
            case Completion(prompt, completion):
                cut = [Segment(prompt, False), Segment(completion, True)]
            case Chat():
                cut = self._turns(document)
        return [segment for segment in cut if segment.text]

    def ends_turn(self, text: str) -> bool:
        """Whether the text ends with one of the tokenizer's added tokens, such as an end of turn."""
        return text.endswith(self._added_tokens)

    def _turns(self, chat: Chat) -> list[Segment]:
        template = self._template(chat)
        if _GENERATION.search(template):
            text, spans = _render(self._tokenizer, template, chat, return_assistant_tokens_mask=True)
        else:
            text, spans = self._difference(template, chat)
        cut = []
        position = 0
        for start, end in spans:
            cut += [Segment(text[position:start], False), Segment(text[start:end], True)]
            position = end
        if not any(segment.is_target and segment.text for segment in cut):
            raise ValueError(
                f"{chat.source}: the chat template leaves nothing of this conversation to the assistant; "
                "remove the line if its answers are empty, else check the {% generation %} blocks"
            )
        return [*cut, Segment(text[position:], False)]

    def _template(self, chat: Chat) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f'{chat.source} has "messages", but the tokenizer {self._tokenizer.name_or_path} has no chat '
                "template; use an instruction-tuned model's tokenizer, or set its chat_template and save it"
            )
        return self._tokenizer.get_chat_template(None, chat.tools)

    def _difference(self, template: str, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """The text, and for every assistant message what its rendering adds behind the prompt."""
        text, _ = _render(self._tokenizer, template, chat)
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = Chat(chat.messages[:number], chat.tools, chat.source)
            through = Chat(chat.messages[: number + 1], chat.tools, chat.source)
            prompt, _ = _render(self._tokenizer, template, before, add_generation_prompt=True)
            answered, _ = _render(self._tokenizer, template, through)
            if not (text.startswith(answered) and answered.startswith(prompt)):
                raise ValueError(
                    f"{chat.source}: the chat template renders the conversation up to message {number + 1}, "
                    "the assistant's, otherwise than as the beginning of the whole, so its tokens cannot be "
                    "told from the prompt's. Use a template with {% generation %} blocks, or give every "
                    "assistant turn a line that ends with it"
                )
            # white space behind the end of turn is the template's: no model generates it
            stripped = answered.rstrip()
            end = len(stripped) if self.ends_turn(stripped) else len(answered)
            spans.append((len(prompt), max(len(prompt), end)))
        return text, spans


def _render(tokenizer: Any, template: str, chat: Chat, **options: Any) -> tuple[str, Any]:
    """The text, and the character spans of its `{% generation %}` blocks."""
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            [chat.messages],
            tools=chat.tools,
            chat_template=template,
            **options,
            **tokenizer.special_tokens_map,
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"{chat.source}: the tokenizer's chat template cannot render this conversation: {error}"
        ) from error
    return texts[0], spans[0] if spans else []
