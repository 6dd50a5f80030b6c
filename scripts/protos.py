"""Generates the protobuf code beside the .proto files. Knows protoc and one import prefix, nothing of the messages."""

import argparse
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "protos"
PACKAGE = "deepinfer/v1"


def generate(target: Path) -> list[Path]:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every proto below `target`; returns the files.

    Raises RuntimeError when protoc refuses a file.
    """
    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).glob("*.proto"))
    include = str(files("grpc_tools") / "_proto")
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, *protos]) != 0:
        raise RuntimeError(f"protoc refused one of {protos}")
    made = sorted((target / PACKAGE).glob("*_pb2*"))
    for path in made:
        path.write_text(_rewrite_imports(path.read_text()))
    return made


def _rewrite_imports(text: str) -> str:
    # The package is importable as protos.deepinfer.v1, so that nothing shadows other projects named deepinfer.
    return re.sub(r"^from deepinfer\.v1 import", "from protos.deepinfer.v1 import", text, flags=re.MULTILINE)


def stale() -> list[str]:
    """Names of committed files that differ from what the .proto files give."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = {p.name: p.read_text() for p in generate(Path(scratch))}
    committed = {p.name: p.read_text() for p in (ROOT / PACKAGE).glob("*_pb2*")}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the committed code is not what protoc gives")
    if not parser.parse_args().check:
        print(f"{len(generate(ROOT))} files")
        return 0
    if different := stale():
        print(f"generated code is stale, run `make protos`: {', '.join(different)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
