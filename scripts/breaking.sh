#!/usr/bin/env bash
# Compares the contract with the last tagged release. Before the first tag the contract may still change freely.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)
if [ -z "$tag" ]; then
  echo "contract: no release is tagged yet, nothing to break"
  exit 0
fi
buf breaking protos --against ".git#tag=$tag,subdir=protos"
echo "contract: compatible with $tag"
