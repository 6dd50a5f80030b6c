"""Which dialect a model speaks: chosen once, from its files and the settings. Knows all dialects, no request."""

from __future__ import annotations

from time import time

from fabric.errors import StartError
from services.recipe import codec
from services.recipe.codec import Codec
from services.recipe.dialect import Dialect
from services.recipe.model_files import ModelFiles
from services.recipe.plain import PlainDialect
from services.recipe.settings import RecipeSettings
from services.recipe.template import TemplateDialect
from services.recipe.template_files import CONFIG_FILE, TEMPLATE_FILE, TemplateFiles


def open_dialect(settings: RecipeSettings) -> Dialect:
    """The dialect that was asked for, or the first that the model's files allow: V4's, its template's, plain text.

    Raises:
        StartError: files are missing or broken, or do not allow what was asked for; names the file and the fix.
    """
    files, form = ModelFiles.read(settings.model), TemplateFiles.read(settings.model)
    kind = settings.dialect if settings.dialect != "auto" else _fitting(settings, files, form)
    if kind == codec.DIALECT:
        encoding = settings.encoding if settings.encoding != "auto" else codec.encoding_of(files)
        return Codec(settings.served_name, files, encoding)
    prefix = _prefix(files, form)
    if kind == "plain":
        return PlainDialect(settings.served_name, files, _why_plain(settings, form), prefix)
    if not form.source:
        raise StartError(
            f"neither {settings.model / TEMPLATE_FILE} nor chat_template in {settings.model / CONFIG_FILE} is there",
            field="dialect",
            fix=f"add {TEMPLATE_FILE} to the folder, or choose --dialect plain",
        )
    return TemplateDialect(settings.served_name, files, form, prefix, settings.template_timeout_s, time)


def _fitting(settings: RecipeSettings, files: ModelFiles, form: TemplateFiles) -> str:
    if settings.encoding != "auto" or codec.detect_encoding(files):
        return codec.DIALECT
    return "template" if form.source else "plain"


def _why_plain(settings: RecipeSettings, form: TemplateFiles) -> str:
    if settings.dialect == "plain":
        return "the recipe runs with --dialect plain"
    return f"its vocabulary is not V4's, and neither {TEMPLATE_FILE} nor chat_template in {form.path.name} is there"


def _prefix(files: ModelFiles, form: TemplateFiles) -> tuple[int, ...]:
    """What `transformers` puts before plain text."""
    if not form.adds_bos:
        return ()
    spelled = form.tokens.get("bos_token", "")
    if spelled not in files.control.ids:
        raise StartError(
            f"{form.path.with_name(CONFIG_FILE)} adds a bos_token that {files.tokenizer_path} has not",
            field="model",
            fix="use both files of one model",
        )
    return (files.control.ids[spelled],)
