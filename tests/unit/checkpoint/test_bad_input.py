"""Every mistake that people make with a folder is refused before the weights are read: by the engine, by the check
before a start, and by `deepinfer inspect`, each naming the same file or key and a way out.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli import checks
from engine.checkpoint.errors import CheckpointError
from engine.config import EngineConfig
from engine.engine import Engine
from engine.families import tiny
from engine.families.check import check_folder
from engine.inspect.__main__ import main as inspect_main
from fabric.errors import StartError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> a quantized tiny folder in two shards with an index; not to be changed."""
    written: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in written:
            written[family] = tiny.write(family, tmp_path_factory.mktemp("whole") / family, 1, True)
            _shard(written[family])
        return written[family]

    return make


def _shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: SHARDS[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def json_edit(file: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return edit


def config(**changes: object) -> Callable[[Path], None]:
    return json_edit("config.json", lambda content: content.update(changes))


def missing_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def truncated_shard(folder: Path) -> None:
    (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes()[:-100])


def pickled(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")


def more_tokens(content: dict) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 700, "content": "<extra>"})


def fewer_tokens(content: dict) -> None:
    content["model"]["vocab"] = {text: i for text, i in content["model"]["vocab"].items() if i < 300}


def weights_of(family: str) -> Callable[[Path], None]:
    """The weights of another family under this folder's config."""

    def edit(folder: Path) -> None:
        for path in [*folder.glob("*.safetensors"), folder / INDEX]:
            path.unlink()
        tiny.write(family, folder / "other", 1, True)
        shutil.move(folder / "other" / "model.safetensors", folder)
        shutil.rmtree(folder / "other")

    return edit


# family, what goes wrong, what the error's field names, what its message says
CASES = {
    "V3 config, V4 weights": ("v3", weights_of("v4"), "model.safetensors", "unknown"),
    "V4 config, V3 weights": ("v4", weights_of("v3"), "model.safetensors", "unknown"),
    "wrong block size": (
        "v3",
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "weight_scale_inv",
        "do not fit blocks of [64, 64]",
    ),
    "no block size": (
        "v4",
        config(quantization_config={"weight_block_size": None}),
        "quantization_config.weight_block_size",
        "not a block size",
    ),
    "no quantization_config": ("v41", config(quantization_config=None), ".scale", "no quantization_config"),
    "missing shard": ("v4", missing_shard, SHARDS[1], "missing"),
    "index names a missing file": (
        "v3",
        json_edit(INDEX, lambda index: index["weight_map"].update({"ghost": "model-00003-of-00002.safetensors"})),
        "model-00003-of-00002.safetensors",
        "missing",
    ),
    "index names a tensor that its shard lacks": (
        "v32",
        json_edit(INDEX, lambda index: index["weight_map"].update({"ghost": SHARDS[0]})),
        "ghost",
        "does not hold it",
    ),
    "truncated shard": ("v41", truncated_shard, SHARDS[0], "outside the file"),
    "tokenizer of a larger vocabulary": ("v3", json_edit("tokenizer.json", more_tokens), "vocab_size", "701 token ids"),
    "tokenizer of a smaller vocabulary": (
        "v4",
        json_edit("tokenizer.json", fewer_tokens),
        "tokenizer.json: vocab_size",
        "300 token ids",
    ),
    "no tokenizer in tokenizer.json": (
        "v3",
        json_edit("tokenizer.json", lambda content: content.clear()),
        "tokenizer.json: model.vocab",
        "no vocabulary",
    ),
    "layer_types too short": (
        "v4",
        config(layer_types=["sliding_attention"] * 6),
        "layer_types",
        "6 entries for 7 layers",
    ),
    "layer_types too long": (
        "v32",
        config(layer_types=["indexed_attention"] * 5),
        "layer_types",
        "5 entries for 4 layers",
    ),
    "compress_ratios too short": (
        "v41",
        json_edit("config.json", lambda content: content["text_config"]["compress_ratios"].pop()),
        "compress_ratios",
        "12",
    ),
    "unknown architecture": (
        "v3",
        config(architectures=["LlamaForCausalLM"], model_type="llama"),
        "architectures",
        "not served here",
    ),
    "a switch of another family": ("v3", config(serving={"handoff_replay": True}), "serving", "unknown"),
    "a switch that is a word": ("v41", config(serving={"handoff_replay": "yes"}), "handoff_replay", "neither true nor"),
    "switches that are a list": ("v4", config(serving=["fake_quantize"]), "serving", "not a section"),
    "pickle alone": ("v4", pickled, "", "pickle is never opened"),
    "a layer more than the weights have": ("v3", config(num_hidden_layers=5), "layers.4", "no tensors"),
    "a layer fewer than the weights have": ("v3", config(num_hidden_layers=3), "layers.3.", "num_hidden_layers is 3"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, whole: Callable[[str], Path], tmp_path: Path) -> tuple[Path, str, str]:
    family, edit, field, message = CASES[request.param]
    folder = shutil.copytree(whole(family), tmp_path / "model")
    edit(folder)
    return folder, field, message


def test_the_engine_and_the_check_before_a_start_refuse_it(case: tuple[Path, str, str]) -> None:
    folder, field, message = case
    for refusing in (lambda: Engine.open(EngineConfig(folder, kernels="reference")), lambda: check_folder(folder)):
        with pytest.raises(CheckpointError) as refused:
            refusing()
        assert field in refused.value.field
        assert message in refused.value.message
        assert refused.value.fix
    with pytest.raises(StartError) as early:
        checks.model_folder(folder)
    assert message in early.value.message
    assert (early.value.field, early.value.fix) == ("--model", refused.value.fix)
    assert not Path("opened").exists()


def test_inspect_refuses_it_or_lists_it(case: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, field, _ = case
    code, answer = inspect_main([str(folder)]), json.loads(capsys.readouterr().out)
    if "error" in answer:
        assert code == 1
        assert field.rpartition("layers.")[2] in answer["error"]["field"]
        assert answer["error"]["fix"]
    else:
        problems = " ".join(answer["problems"])
        assert problems
        assert field in problems or "missing" in problems or "unknown" in problems


@pytest.mark.parametrize("family", tiny.WRITERS)
def test_a_whole_folder_passes_all_of_them(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.write(family, tmp_path / "model", 2)
    check_folder(folder)
    checks.model_folder(folder)
    assert inspect_main([str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


@pytest.mark.parametrize("padding", [0, 25])
def test_a_vocabulary_that_is_padded_a_little_passes(
    padding: int, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole("v3"), tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {text: i for text, i in vocabulary.items() if i < 512 - padding}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    check_folder(folder)


def test_a_scale_that_is_nan_is_named_when_it_is_read(whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(whole("v41"), tmp_path / "model")
    name = "layers.3.attn.wq_b.scale"
    shard = next(path for path in map(folder.joinpath, SHARDS) if name in load_file(path))
    tensors = load_file(shard)
    spoiled = tensors[name].view(torch.uint8).clone()
    spoiled[0, 0] = 255
    save_file(tensors | {name: spoiled.view(torch.float8_e8m0fnu)}, shard)
    with pytest.raises(CheckpointError, match="NaN") as refused:
        Engine.open(EngineConfig(folder, kernels="reference"))
    assert (refused.value.file, refused.value.item) == (str(shard), name)


def test_the_check_before_a_start_needs_no_torch() -> None:
    assert "torch" in sys.modules  # here it is loaded, so a fresh process must tell
    import subprocess

    script = "import sys, cli.checks; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    root = Path(checks.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=100, check=False).returncode == 0
