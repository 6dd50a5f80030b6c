#!/usr/bin/env bash
# Makes .venv hold what PROFILE needs: `serve` runs the stack, `dev` also tests and lints it.
# TORCH_INDEX_URL, when set, is the package index that torch alone is taken from (a CPU build, a CUDA build).
# Does nothing, in milliseconds, while pyproject.toml and this file are what they were.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-dev}
case $profile in
  serve) extras=engine ;;
  dev) extras=engine,dev ;;
  *) echo "setup: unknown profile '$profile'; say serve or dev" >&2; exit 2 ;;
esac
# Carries KV between processes. Its wheel asks for torch, which most services never load, hence --no-deps below.
nixl='nixl-cu12==1.5.1'

key=$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)
fresh() { [ -x .venv/bin/python ] && [ "$(cat ".venv/.deepinfer-$1" 2>/dev/null)" = "$key" ]; }
if fresh dev || fresh "$profile"; then exit 0; fi

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup: '$python' is not Python 3.11 or newer; install one and run: make setup PYTHON=python3.11" >&2
  exit 1
fi
if [ ! -x .venv/bin/python ] && ! "$python" -m venv .venv; then
  rm -rf .venv
  echo "setup: '$python' cannot make virtual environments; install its venv module (Debian: python3-venv)" >&2
  exit 1
fi

pip=(.venv/bin/python -m pip install --disable-pip-version-check)
[ -t 1 ] || pip+=(--quiet)
if [ -n "${TORCH_INDEX_URL:-}" ]; then
  torch=$(.venv/bin/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(next(r for r in extras["engine"] if r.startswith("torch")))')
  echo "setup: $torch from TORCH_INDEX_URL"
  "${pip[@]}" --index-url "$TORCH_INDEX_URL" "$torch"
fi
echo "setup: deepinfer-serve[$extras] (1.7 GB on disk with a CPU build of torch, 2.8 with what tests need)"
"${pip[@]}" --editable ".[$extras]"
"${pip[@]}" --no-deps "$nixl"
echo "$key" > ".venv/.deepinfer-$profile"
echo "setup: ready, .venv/bin/deepinfer is the command"
