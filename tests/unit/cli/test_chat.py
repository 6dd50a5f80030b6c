"""Where `deepinfer chat` finds its gateway."""

import pytest

from cli import chat, runtime
from fabric.errors import InvalidArgument, Unavailable


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://models.example/v1/", "https://models.example"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_is_taken_as_users_write_it(said, url):
    assert chat.gateway_url(said) == url


@pytest.mark.parametrize("said", ["ftp://127.0.0.1", "http://", "127.0.0.1:99999", "http://[::1", "http://host:port"])
def test_what_is_no_address_of_http_is_refused_by_its_option(said):
    with pytest.raises(InvalidArgument, match="no address of HTTP") as refused:
        chat.gateway_url(said)
    assert refused.value.field == "--url" and refused.value.fix


def test_without_a_stack_the_user_hears_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "folder", lambda: tmp_path)
    with pytest.raises(Unavailable, match="no stack of yours serves here") as refused:
        chat.chat(chat.ChatOptions(url="", model="", system="", api_key="", max_tokens=None))
    assert "deepinfer up" in refused.value.fix and "--url" in refused.value.fix
