"""Keeps this machine out of the repository. Knows tracked files and what must not stand in them, no Python of ours."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REGISTRY_HOST = r"https?://(?:(?:files|registry|index|deb|download)\.|pypi\.org)"
# Folders that every machine has say nothing about this one.
COMMON = {Path(place) for place in ("/", "/tmp", "/home", "/opt", "/srv", "/mnt")}  # noqa: S108
SKIPPED = (".lock", "tokenizer.json", ".safetensors")


def forbidden(root: Path, home: Path) -> re.Pattern[str]:
    """Pattern of the checkout, the folder it stands in, the home folder and package registries' hosts."""
    places = {f"{place}/" for place in {root, root.parent, home} - COMMON}
    return re.compile("|".join([*sorted(map(re.escape, places)), REGISTRY_HOST]))


def findings(root: Path, pattern: re.Pattern[str]) -> list[str]:
    """`file:line: text` of each match in a tracked text file below `root`."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(None, names.split("\0")):
        path = root / name
        if name.endswith(SKIPPED) or not path.is_file():
            continue
        lines = path.read_bytes().decode("utf-8", errors="ignore").splitlines()
        found += [f"{name}:{i}: {line.strip()[:120]}" for i, line in enumerate(lines, 1) if pattern.search(line)]
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = findings(ROOT, forbidden(ROOT, Path.home()))
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("hygiene: paths of one machine or hosts of a package registry; remove them", file=sys.stderr)
        return 1
    print("hygiene: clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
