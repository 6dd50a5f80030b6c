"""Tenants: who calls, and what they may share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fabric.errors import StartError, Unauthenticated
from fabric.retention import OWNER_BYTES, RetentionClass
from services.gateway.regions import RegionSettings
from services.gateway.settings import GatewaySettings
from services.gateway.tenants import Account, Tenants, hash_key, load_accounts

ACCOUNTS = {"ann": Account(hash_key("key-a")), "bob": Account(hash_key("key-b"))}

LINE = f"ann {'00' * 32}\n"


def test_a_key_names_its_tenant() -> None:
    tenants = Tenants(ACCOUNTS, b"secret")
    assert tenants.identify("Bearer key-b").name == "bob"
    assert tenants.identify("bearer key-a").name == "ann"


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", "Basic key-a", "key-a", "Bearer key-a x"])
def test_anything_else_is_unauthenticated(authorization: str) -> None:
    with pytest.raises(Unauthenticated):
        Tenants(ACCOUNTS, b"secret").identify(authorization)


def test_without_keys_everybody_is_one_tenant() -> None:
    tenants = Tenants({}, b"secret")
    assert tenants.identify("") == tenants.identify("Bearer whatever")


def test_salts_differ_between_tenants_and_secrets_and_are_stable() -> None:
    one, same, other = Tenants(ACCOUNTS, b"s1"), Tenants(ACCOUNTS, b"s1"), Tenants(ACCOUNTS, b"s2")
    salt = one.identify("Bearer key-a").salt
    assert len(salt) == 32 and salt == same.identify("Bearer key-a").salt
    assert salt not in (one.identify("Bearer key-b").salt, other.identify("Bearer key-a").salt)


def test_a_key_file_holds_hashes_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# tenants\nann {ACCOUNTS['ann'].digest.hex()}  # first\n\nbob {ACCOUNTS['bob'].digest.hex()}\n")
    assert load_accounts(file) == ACCOUNTS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "ann key-a\n",
        "ann\n",
        f"{LINE[:-3]}",
        "a b c\n",
        f"{LINE[:-1]} week\n",
        f"{LINE[:-1]} chat x\n",
        LINE * 2,
    ],
)
def test_a_bad_key_file_stops_the_start_without_quoting_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(StartError) as caught:
        load_accounts(file)
    assert caught.value.field == "keys_file" and "key-a" not in str(caught.value)


def test_a_missing_key_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError):
        load_accounts(tmp_path / "none")


def test_a_key_file_may_say_what_a_tenants_requests_belong_to(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann {ACCOUNTS['ann'].digest.hex()} agent\nbob {ACCOUNTS['bob'].digest.hex()}\n")
    tenants = Tenants(load_accounts(file), b"secret")
    assert tenants.identify("Bearer key-a").retention is RetentionClass.AGENT
    assert tenants.identify("Bearer key-b").retention is None


def test_owners_stand_for_tenants_without_their_names() -> None:
    one, other = Tenants(ACCOUNTS, b"s1"), Tenants(ACCOUNTS, b"s2")
    ann, bob, elsewhere = one.identify("Bearer key-a"), one.identify("Bearer key-b"), other.identify("Bearer key-a")
    assert len({ann.owner, bob.owner, elsewhere.owner, ann.salt[:OWNER_BYTES]}) == 4
    assert {len(tenant.owner) for tenant in (ann, bob)} == {OWNER_BYTES} and b"ann" not in ann.owner


def region(**fields: Any) -> RegionSettings:
    return RegionSettings(**{"name": "desk", "tenants": ["ann", "bob"], "text": "hello"} | fields)


def test_a_region_is_shared_by_those_it_names_alone_and_its_salt_is_no_tenants() -> None:
    accounts = ACCOUNTS | {"cat": Account(hash_key("key-c"))}
    tenants = Tenants(accounts, b"secret", [region(), region(name="ann", tenants=["ann", "cat"])])
    ann, bob, cat = (tenants.identify(f"Bearer key-{letter}") for letter in "abc")
    assert [[each.name for each in tenant.regions] for tenant in (ann, bob, cat)] == [
        ["desk", "ann"],
        ["desk"],
        ["ann"],
    ]
    assert ann.regions[0] == bob.regions[0] and ann.regions[1] == cat.regions[0]
    assert len({ann.salt, bob.salt, cat.salt, *(each.salt for each in ann.regions)}) == 5


@pytest.mark.parametrize(
    ("regions", "field"),
    [
        ([region(tenants=["ann", "eve"])], "regions[0].tenants"),
        ([region(), region(text="other")], "regions[1].name"),
    ],
)
def test_a_region_that_cannot_be_stops_the_start(regions: list[RegionSettings], field: str) -> None:
    with pytest.raises(StartError) as caught:
        Tenants(ACCOUNTS, b"secret", regions)
    assert caught.value.field == field and caught.value.fix


@pytest.mark.parametrize(
    "fields", [{"text": None}, {"system": "too"}, {"tenants": ["ann"]}, {"name": "a b"}, {"text": ""}, {"texts": "x"}]
)
def test_a_region_names_two_tenants_and_one_opening(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        region(**fields)


def test_settings_never_print_what_a_region_says() -> None:
    printed = GatewaySettings(regions=[{"name": "desk", "tenants": ["ann", "bob"], "system": "CANARY"}]).printable()
    assert "CANARY" not in str(printed) and printed["regions"][0]["name"] == "desk"
