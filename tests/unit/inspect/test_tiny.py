"""A tiny folder of any family opens, repeats by its seed, has a tokenizer for serving, and spares full folders."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from engine.errors import InvalidParameter
from engine.families import open_family, tiny, tiny_tokenizer
from kernels import choose
from services.recipe.codec import Codec
from services.recipe.model_files import ModelFiles

FAMILIES = list(tiny.WRITERS)


@pytest.mark.parametrize(
    ("family", "quantized"),
    [(family, quantized) for family in FAMILIES for quantized in (False, True) if (family, quantized) != ("v2", True)],
)
def test_a_tiny_folder_opens(tiny_folder, family, quantized):
    model = open_family(tiny_folder(family, quantized), torch.float32, False, choose("reference"))
    assert model.vocab_size == 512


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recipe_service_takes_the_tokenizer(tiny_folder, family):
    codec = Codec("tiny", ModelFiles.read(tiny_folder(family)), "v4.1")
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Grüß dich"}]}).encode()
    assert max(codec.render_chat(body).token_ids) < codec.vocab_size


def test_every_byte_survives_the_tokenizer():
    tokenizer = Tokenizer.from_str(tiny_tokenizer.build(512))
    text = "The 'naïve' 字 \t\n\x00 \U0001f600 end"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) < len(text.encode())  # letter pairs are joined
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.token_to_id("<｜end▁of▁sentence｜>") == 1


@pytest.mark.parametrize("size", [100, 5000])
def test_a_vocabulary_that_cannot_be_filled_is_refused(size):
    with pytest.raises(InvalidParameter, match="vocab_size"):
        tiny_tokenizer.build(size)


def test_the_same_seed_writes_the_same_bytes_and_another_others(tmp_path):
    written = [tiny.write("v3", tmp_path / str(i), seed) for i, seed in enumerate((0, 0, 1))]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in written)
    assert first == again != other


@pytest.mark.parametrize("occupied", ["file", "folder"])
def test_what_is_there_is_not_overwritten(tmp_path, occupied):
    target = tmp_path / "target"
    if occupied == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(InvalidParameter, match="empty folder"):
        tiny.write("v3", target)
    assert (target if occupied == "file" else target / "mine").read_text() == "mine"


@pytest.mark.parametrize(("family", "quantized", "field"), [("v9", False, "family"), ("v2", True, "quantized")])
def test_a_refused_order_writes_nothing(tmp_path, capsys, family, quantized, field):
    arguments = [family, str(tmp_path / "new"), *(["--quantized"] if quantized else [])]
    assert tiny.main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field
    assert not (tmp_path / "new").exists()
