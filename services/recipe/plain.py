"""The plain dialect: text in, text out, for a model whose chat form nobody told. Knows a tokenizer, no conversation."""

from __future__ import annotations

from fabric.errors import InvalidArgument
from services.recipe import options
from services.recipe.dialect import ChatParser, Process, Rendered
from services.recipe.model_files import ModelFiles
from services.recipe.options import ParsingOptions
from services.recipe.text import TextParser


class PlainDialect:
    """Generate works, Chat is refused. The other dialects render and parse plain text as this one does.

    Args:
        no_template: why there is no chat form, naming the file; for the error that Chat answers.
        prefix: ids that come before every plain text, such as the beginning of sentence.
    """

    encoding = "plain"
    chats = False

    def __init__(self, model: str, files: ModelFiles, no_template: str = "", prefix: tuple[int, ...] = ()) -> None:
        self.model = model
        self.max_context_tokens, self.vocab_size = files.max_context_tokens, files.vocab_size
        self._files, self._no_template, self._prefix = files, no_template, prefix
        self.processes: tuple[Process, ...] = ()
        self.silent: tuple[str, ...] = tuple(filter(None, map(files.spelled, sorted(files.eos_token_ids))))

    def render_chat(self, body: bytes) -> Rendered:
        """Raises InvalidArgument naming the file that would tell the form of a conversation."""
        raise InvalidArgument(
            f"{self.model!r} has no chat form: {self._no_template}",
            field="messages",
            fix="add the model's chat_template.jinja to its folder and restart the recipe, or use Generate",
        )

    def render_text(self, text: str) -> Rendered:
        """Encodes plain text as it is: nothing in it becomes a control token.

        Raises:
            InvalidArgument: the text is empty or does not fit the context.
        """
        if not text:
            raise InvalidArgument("the prompt is empty", field="text", fix="send at least one character")
        self._refuse_overlong(len(text), "text")
        token_ids = [*self._prefix, *self._files.plain.encode(text, add_special_tokens=False).ids]
        room = self._room(len(token_ids), "text")
        return Rendered(token_ids, options.dump(ParsingOptions()), "", "", room, False)

    def chat_parser(self, parsing: ParsingOptions, request_id: str) -> ChatParser:
        """Raises InvalidArgument, as `render_chat`."""
        raise InvalidArgument(f"{self.model!r} has no chat form", field="dialect", fix="use the text dialect")

    def text_parser(self) -> TextParser:
        """A parser for the continuation of a plain prompt."""
        return TextParser(self._files.full, self._files.eos_token_ids)

    @property
    def _most_chars(self) -> int:
        """A token stands for a bounded number of characters: what cannot fit is refused before it costs an encoding."""
        return self.max_context_tokens * self._files.longest_token_chars

    def _refuse_overlong(self, chars: int, field: str) -> None:
        if chars > self._most_chars:
            raise self._too_long(f"more than {self.max_context_tokens} tokens", field)

    def _room(self, prompt_tokens: int, field: str) -> int:
        if prompt_tokens >= self.max_context_tokens:
            raise self._too_long(f"{prompt_tokens} tokens", field)
        return self.max_context_tokens - prompt_tokens

    def _too_long(self, size: str, field: str) -> InvalidArgument:
        return InvalidArgument(
            f"the prompt has {size}, the context of {self.model!r} holds {self.max_context_tokens} with the answer",
            field=field,
            fix="shorten the prompt",
        )
