"""What the user types and what is asked because of it."""

import pytest

from cli.conversation import Conversation, Said, Turn, read_message


def typed(*lines: str):
    """A read_line that gives these lines and notes which of them continued a message."""
    left, continued = list(lines), []

    def read_line(more: bool) -> str:
        continued.append(more)
        return left.pop(0)

    return read_line, continued


@pytest.mark.parametrize(
    ("lines", "message", "continued"),
    [
        (["hello"], "hello", [False]),
        (["one\\", "two\\", "three"], "one\ntwo\nthree", [False, True, True]),
        (['"""', "  def f():", "    pass", '"""'], "def f():\n    pass", [False, True, True, True]),
        (['"""one line"""'], "one line", [False]),
        (['"""first', 'last"""'], "first\nlast", [False, True]),
    ],
)
def test_messages_of_several_lines(lines, message, continued):
    read_line, noted = typed(*lines)
    assert read_message(read_line) == message
    assert noted == continued


def test_a_question_carries_all_that_was_said_and_changes_nothing_by_itself():
    conversation = Conversation("nano", system="Be brief.")
    conversation.remember("Hi", "Hello")
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?"},
    ]
    assert conversation.request("Why?") == {"model": "nano", "messages": expected}
    assert conversation.request("Why?")["messages"] == expected


def test_reset_forgets_all_but_the_system_message():
    conversation = Conversation("nano", system="Be brief.")
    conversation.remember("Hi", "Hello")
    assert conversation.understand("/reset").turn is Turn.NOTE
    assert [m["role"] for m in conversation.request("Again")["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [("/think on", {"type": "enabled"}), ("/think off", {"type": "disabled"}), ("/think", None)],
)
def test_think_switches_reasoning_until_it_is_switched_again(command, expected):
    conversation = Conversation("nano")
    conversation.thinking = True
    conversation.understand(command)
    assert conversation.request("x").get("thinking") == expected


def test_an_unknown_command_is_not_sent_to_the_model():
    said = Conversation("nano").understand("/rest")
    assert said.turn is Turn.NOTE
    assert "/rest" in said.text
    assert "/reset" in said.text


def test_quit_leaves_and_text_is_said():
    assert Conversation("nano").understand("/quit") == Said(Turn.QUIT)
    assert Conversation("nano").understand("a / b") == Said(Turn.SAY, "a / b")
