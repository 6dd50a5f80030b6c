"""Which dialect a folder gets, and what is said when it cannot be the one that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import InvalidArgument, StartError
from services.recipe import choice
from services.recipe.dialect import Dialect
from services.recipe.settings import RecipeSettings
from tests.support import bytemodel, templatemodel


def opened(folder: Path, **settings: Any) -> Dialect:
    dialect = choice.open_dialect(RecipeSettings(discovery="memory://x", model=folder, **settings))
    for process in dialect.processes:
        process.close()
    return dialect


@pytest.mark.parametrize("dialect", ["auto", "v4"])
def test_v4s_vocabulary_speaks_v4s_encoding_even_beside_a_template(tmp_path: Path, dialect: str) -> None:
    folder = bytemodel.write(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("x")
    assert opened(folder, dialect=dialect).encoding == "v4.1"
    assert opened(folder, dialect="template").encoding == "template"


def test_v4_is_told_from_its_successor_by_the_vocabulary(tmp_path: Path) -> None:
    folder = bytemodel.write(tmp_path / "m")
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["added_tokens"] = [entry for entry in tree["added_tokens"] if entry["content"] != "<｜System｜>"]
    for index, entry in enumerate(tree["added_tokens"]):
        entry["id"] = 256 + index
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    assert opened(folder).encoding == "plain"  # another model with most of the tokens
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v4"}))
    assert opened(folder).encoding == "v4"
    assert opened(folder, encoding="v4.1").encoding == "v4.1"


def test_a_template_is_spoken_where_there_is_one(tmp_path: Path) -> None:
    assert opened(templatemodel.write(tmp_path / "a", templatemodel.V3)).encoding == "template"
    assert opened(templatemodel.write(tmp_path / "b", templatemodel.V3), dialect="plain").encoding == "plain"


def test_named_templates_count_by_the_default_one(tmp_path: Path) -> None:
    folder = templatemodel.write(tmp_path / "m", None)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "rag", "template": "{% for %}"}, {"name": "default", "template": "x"}]
    path.write_text(json.dumps(config | {"chat_template": named}))
    assert opened(folder).encoding == "template"
    path.write_text(json.dumps(config | {"chat_template": named[:1]}))
    with pytest.raises(StartError, match=r"tokenizer_config\.json has a chat_template that is neither"):
        opened(folder)


def test_without_a_chat_form_chat_is_refused_by_file_and_fix(tmp_path: Path) -> None:
    dialect = opened(templatemodel.write(tmp_path / "m", None))
    assert (dialect.encoding, dialect.chats) == ("plain", False)
    with pytest.raises(InvalidArgument, match=r"neither chat_template\.jinja nor .* tokenizer_config\.json") as caught:
        dialect.render_chat(b"{}")
    assert "Generate" in caught.value.fix


@pytest.mark.parametrize(
    ("settings", "named"), [({"dialect": "template"}, "chat_template.jinja"), ({"dialect": "v4"}, "｜DSML｜")]
)
def test_a_choice_that_cannot_be_met_stops_the_start(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(StartError) as caught:
        opened(templatemodel.write(tmp_path / "m", None), **settings)
    assert named in caught.value.message and caught.value.field == "dialect" and caught.value.fix


@pytest.mark.parametrize(
    "text", ["not json", "[]", '{"chat_template": 5}', '{"add_bos_token": true, "bos_token": "x"}']
)
def test_a_broken_tokenizer_config_stops_the_start_by_name(tmp_path: Path, text: str) -> None:
    folder = templatemodel.write(tmp_path / "m", None)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(StartError, match=r"tokenizer_config\.json"):
        opened(folder)


def test_no_tokenizer_config_is_needed(tmp_path: Path) -> None:
    folder = templatemodel.write(tmp_path / "m", None)
    (folder / "tokenizer_config.json").unlink()
    assert opened(folder).render_text("hi").token_ids == templatemodel.encode("hi")
