"""The template dialect: conversations in the form of the chat template that came with a model, and their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fabric.errors import InvalidArgument
from services.recipe import codec, conversation
from services.recipe.conversation import Conversation
from services.recipe.dialect import ChatParser, Rendered
from services.recipe.markup import CallMark
from services.recipe.mask import Mask
from services.recipe.model_files import ModelFiles
from services.recipe.options import ParsingOptions
from services.recipe.plain import PlainDialect
from services.recipe.reasoning import Marks
from services.recipe.template_files import TemplateFiles
from services.recipe.template_parser import AnswerForm, TemplateParser
from services.recipe.template_process import TemplateProcess
from services.recipe.token_text import TokenText

_MOST_CHARS = 1 << 23
_OPENS, _CLOSES = "<think>", "</think>"


class TemplateDialect(PlainDialect):
    """One model's chat template with its tokenizer. The template renders in the one of its `processes`."""

    encoding = "template"
    chats = True

    def __init__(
        self,
        model: str,
        files: ModelFiles,
        form: TemplateFiles,
        prefix: tuple[int, ...],
        timeout_s: float,
        now: Callable[[], float],
    ) -> None:
        """`now` tells unix seconds, for templates that write the date.

        Raises:
            StartError: the template does not compile; names its file.
        """
        super().__init__(model, files, prefix=prefix)
        self._form, self._now = form, now
        self._conversion = codec.conversion_for(model)
        ids = files.control.ids
        calls = {ids[mark.value]: mark for mark in CallMark if mark.value in ids}
        eos = {ids[spelled] for spelled in [form.tokens.get("eos_token", "")] if spelled in ids}
        self._answers = AnswerForm(
            tokenizer=files.full,
            texts=TokenText(files.full, ids),
            marks=Marks(files.eos_token_ids | eos, ids.get(_CLOSES), ids.get(CallMark.CALLS_BEGIN.value)),
            reasoning_start=ids.get(_OPENS),
            calls=calls if len(calls) == len(CallMark) else {},
        )
        structure = (*map(files.spelled, sorted(self._answers.marks.eos)), _OPENS, _CLOSES)
        self.silent = (*filter(None, structure), *(mark.value for mark in self._answers.calls.values()))
        self._process = TemplateProcess(form.source, form.path, timeout_s)
        self.processes = (self._process,)

    def render_chat(self, body: bytes) -> Rendered:
        """Renders one OpenAI Chat Completions request; nothing that the client wrote becomes a control token.

        Raises:
            InvalidArgument: the request is not one, the template refuses it, or it does not fit; names the field.
            NotFound: it names another model.
            DeadlineExceeded, Exhausted, Unavailable: the template took too long, or its process ended.
        """
        converted = codec.read_request(body, self.model, self._conversion)
        tree = json.loads(body)
        mask = Mask(self._files.control.characters, set(json.dumps(tree, ensure_ascii=False) + self._form.source))
        chat = conversation.read(tree)
        token_ids, reasons = self._encode(self._render(chat, mask), mask)
        self._room(len(token_ids), "messages")
        parsing = ParsingOptions(stage="reasoning_start" if reasons else "", tools=bool(chat.tools))
        return codec.finished(converted, token_ids, parsing, self.max_context_tokens)

    def chat_parser(self, parsing: ParsingOptions, request_id: str) -> ChatParser:
        """A parser for the answer to one rendered conversation."""
        return TemplateParser(self._answers, parsing, request_id)

    def _render(self, chat: Conversation, mask: Mask) -> str:
        """The template's text, with everything of the client behind `mask`."""
        hidden = self._ask(chat.hidden(mask))
        # Templates of reasoning models cut reasoning out of earlier answers, which they cannot see behind the mask.
        # Cut for them, the text counts only if it is what the template makes of the bare conversation.
        shorter = chat.without_reasoning()
        if shorter is None:
            return hidden
        cut = self._ask(shorter.hidden(mask))
        return cut if mask.show(cut) == self._ask(chat) else hidden

    def _ask(self, chat: Conversation) -> str:
        variables = self._form.tokens | chat.variables
        most = min(self._most_chars, _MOST_CHARS)
        reply = self._process.ask({"variables": variables, "max_chars": most, "now": self._now()})
        if "text" in reply:
            return str(reply["text"])
        if "overlong" in reply:
            raise self._too_long(f"more than {most} characters", "messages")
        raise self._refusal(reply)

    def _refusal(self, reply: dict[str, Any]) -> InvalidArgument:
        """Why the template gave no text; its own words are told if they are all its own."""
        said, fix = str(reply.get("refused", "")), "use roles, and an order of them, that the model was trained on"
        if said and said in self._form.source:
            return InvalidArgument(f"the chat template refuses: {said}", field="messages", fix=fix)
        how = str(reply.get("failed", "it refuses"))
        return InvalidArgument(f"the chat template cannot render this conversation: {how}", field="messages", fix=fix)

    def _encode(self, text: str, mask: Mask) -> tuple[list[int], bool]:
        """Ids of a masked text, and whether it ends where the model is to reason."""
        token_ids: list[int] = []
        opened = False
        for piece, control in self._files.control.split(text):
            if control is None:
                token_ids += self._encode_plain(mask.show(piece))
                opened = opened and not piece.strip()
            else:
                token_ids.append(control)
                opened = control == self._answers.reasoning_start
        return token_ids, opened and self._answers.marks.reasoning_end is not None

    def _encode_plain(self, text: str) -> list[int]:
        token_ids: list[int] = self._files.plain.encode(text, add_special_tokens=False).ids
        if not self._files.control.values.isdisjoint(token_ids):
            raise InvalidArgument(
                "a text spells a control token that this tokenizer cannot tell from it",
                field="messages",
                fix="leave the control token out",
            )
        return token_ids
