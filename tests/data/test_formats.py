"""Rows in each accepted format, and rows in none."""

import pytest

from plora_jax.data.formats import Turn, to_record
from plora_jax.data.read import Row
from plora_jax.errors import UserError

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def record(format="auto", **fields):
    return to_record(Row("f.jsonl, line 3", fields), format)


@pytest.mark.parametrize(
    ("fields", "format", "turns"),
    [
        ({"messages": CHAT}, "chat", ["q", "a"]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt",
            ["q", "a"],
        ),
        ({"instruction": "q", "output": "a"}, "alpaca", ["q", "a"]),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca", ["q", "a"]),
        ({"instruction": "q", "input": None, "output": "a"}, "alpaca", ["q", "a"]),
        ({"instruction": "q", "input": "i", "output": "a"}, "alpaca", ["q\n\ni", "a"]),
        ({"messages": CHAT, "prompt": None, "completion": None, "id": 7}, "chat", ["q", "a"]),
    ],
)
def test_conversations(fields, format, turns):
    found = record(**fields)
    assert found.format == format
    assert found.turns == (Turn("user", turns[0]), Turn("assistant", turns[1]))


def test_prompt_and_completion_and_text():
    found = record(prompt="p", completion=" c", text="t", choices=[" c", " d"])
    assert (found.format, found.prompt, found.completion, found.choices) == (
        "prompt-completion",
        "p",
        " c",
        (" c", " d"),
    )
    assert (record(text="t").format, record(text="t").prompt, record(text="t").completion) == (
        "text",
        "",
        "t",
    )


def test_the_format_can_be_said():
    assert record("text", prompt="p", completion="c", text="t").completion == "t"
    with pytest.raises(
        UserError, match=r"f\.jsonl, line 3: field 'messages' of format chat is missing; it has 'text'"
    ):
        record("chat", text="t")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert record(messages=[{"role": "assistant", "content": parts}]).turns[0].content == "ab"


@pytest.mark.parametrize(
    ("fields", "blank"),
    [
        ({"prompt": "p", "completion": ""}, True),
        ({"prompt": "p", "completion": " \n\t"}, True),
        ({"prompt": "", "completion": "c"}, False),
        ({"text": "  "}, True),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]}, True),
        ({"messages": [*CHAT, {"role": "assistant", "content": ""}]}, False),
    ],
)
def test_rows_with_nothing_to_train_on_are_well_formed_but_blank(fields, blank):
    assert record(**fields).blank is blank


def turn(role="user", content="q"):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "has none of the accepted fields, only no fields. Accepted: chat (messages)"),
        ({"question": "q", "answer": "a"}, "none of the accepted fields, only 'question', 'answer'"),
        ({"prompt": "p"}, "field 'completion' is missing; the row has 'prompt'"),
        ({"completion": "c", "id": 1}, "field 'prompt' is missing"),
        ({"instruction": "i", "response": "r"}, "field 'output' is missing"),
        ({"prompt": None, "completion": "c"}, "field 'prompt' holds null where text is due"),
        ({"prompt": "p", "completion": 7}, "field 'completion' holds the number 7 where text is due"),
        (
            {"prompt": "p", "completion": True},
            "field 'completion' holds the truth value true where text is due",
        ),
        ({"prompt": ["p"], "completion": "c"}, "field 'prompt' holds a list where text is due"),
        ({"text": {"a": 1}}, "field 'text' holds an object where text is due"),
        ({"text": "\ud800"}, "field 'text' holds half of a surrogate pair"),
        ({"instruction": "i", "input": 3, "output": "o"}, "field 'input' holds the number 3"),
        ({"messages": "hello"}, "field 'messages' holds text where a list of turns is due"),
        ({"messages": []}, "field 'messages' holds an empty list where a list of turns is due"),
        ({"messages": ["hello"]}, "messages[0] holds text where a turn {'role', 'content'} is due"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no field 'content'; it has 'role'"),
        (
            {"messages": [turn(), turn("robot")]},
            "messages[1].role is 'robot'; allowed: system, user, assistant, tool",
        ),
        (
            {"messages": [turn(), turn("assistant", None)]},
            "field 'messages[1].content' holds null where text is due",
        ),
        ({"messages": [turn("assistant", [{"type": "image"}])]}, "messages[0].content[0] is not a text part"),
        (
            {"messages": [turn("assistant", "") | {"tool_calls": [{}]}]},
            "messages[0].tool_calls: calls of tools",
        ),
        ({"messages": [turn()]}, "field 'messages' has no assistant turn"),
        ({"conversations": [{"from": "human", "text": "q"}]}, "conversations[0] has no field 'value'"),
        (
            {"conversations": [{"from": "me", "value": "q"}]},
            "conversations[0].from is 'me'; allowed: human, user, gpt",
        ),
        (
            {"prompt": "p", "completion": "c", "choices": "cd"},
            "field 'choices' must be a list of at least two texts",
        ),
        ({"prompt": "p", "completion": "c", "choices": ["c", 1]}, "field 'choices[1]' holds the number 1"),
    ],
)
def test_faults_name_the_place_and_the_field(fields, says):
    with pytest.raises(UserError) as caught:
        record(**fields)
    assert str(caught.value).startswith("f.jsonl, line 3: ") and says in str(caught.value)
