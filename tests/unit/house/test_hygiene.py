"""Machine paths and registry hosts are found in tracked files, and only there."""

import subprocess
from pathlib import Path

from scripts import hygiene


def tracked_repository(root: Path, files: dict[str, str]) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    return root


def test_a_path_below_the_checkout_or_home_is_named_with_its_line(tmp_path):
    root = tracked_repository(tmp_path / "checkout", {"a.md": f"fine\nsee {tmp_path}/checkout/x\n", "b.md": "/home\n"})
    assert hygiene.findings(root, hygiene.forbidden(root, tmp_path / "me")) == [f"a.md:2: see {tmp_path}/checkout/x"]


def test_a_registry_host_is_named(tmp_path):
    host = "https://files" + ".example.org/simple"
    root = tracked_repository(tmp_path / "checkout", {"a.toml": f'url = "{host}"\n', "b.md": "https://example.org\n"})
    assert [line.split(":")[0] for line in hygiene.findings(root, hygiene.forbidden(root, tmp_path / "me"))] == [
        "a.toml"
    ]


def test_folders_that_every_machine_has_are_no_finding():
    pattern = hygiene.forbidden(Path("/tmp/clone"), Path("/"))  # noqa: S108
    assert not pattern.search("cd /tmp/x")
    assert pattern.search("cd /tmp/clone/x")
