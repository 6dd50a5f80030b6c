"""Tenants: who calls, and what they may share."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric.errors import StartError, Unauthenticated
from services.gateway.tenants import Tenants, hash_key, load_hashes

HASHES = {"ann": hash_key("key-a"), "bob": hash_key("key-b")}


def test_a_key_names_its_tenant() -> None:
    tenants = Tenants(HASHES, b"secret")
    assert tenants.identify("Bearer key-b").name == "bob"
    assert tenants.identify("bearer key-a").name == "ann"


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", "Basic key-a", "key-a", "Bearer key-a x"])
def test_anything_else_is_unauthenticated(authorization: str) -> None:
    with pytest.raises(Unauthenticated):
        Tenants(HASHES, b"secret").identify(authorization)


def test_without_keys_everybody_is_one_tenant() -> None:
    tenants = Tenants({}, b"secret")
    assert tenants.identify("") == tenants.identify("Bearer whatever")


def test_salts_differ_between_tenants_and_secrets_and_are_stable() -> None:
    one, same, other = Tenants(HASHES, b"s1"), Tenants(HASHES, b"s1"), Tenants(HASHES, b"s2")
    salt = one.identify("Bearer key-a").salt
    assert len(salt) == 32 and salt == same.identify("Bearer key-a").salt
    assert salt not in (one.identify("Bearer key-b").salt, other.identify("Bearer key-a").salt)


def test_a_key_file_holds_hashes_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# tenants\nann {HASHES['ann'].hex()}  # first\n\nbob {HASHES['bob'].hex()}\n")
    assert load_hashes(file) == HASHES


@pytest.mark.parametrize("text", ["", "# nothing\n", "ann key-a\n", "ann\n", f"ann {'00' * 31}\n", "a b c\n"])
def test_a_bad_key_file_stops_the_start_without_quoting_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(StartError) as caught:
        load_hashes(file)
    assert caught.value.field == "keys_file" and "key-a" not in str(caught.value)


def test_a_missing_key_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError):
        load_hashes(tmp_path / "none")
