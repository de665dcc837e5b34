"""Where the assistant's characters are, under templates shaped like those of the model families."""

import pytest

from plora_jax.data.formats import Turn
from plora_jax.data.template import Template, merge_system
from plora_jax.errors import UserError
from tests.data.conftest import CHATML, make_tokenizer

LLAMA2 = (  # a space before the end mark, BOS in the text, the system text inside the first user turn
    "{% if messages[0].role == 'system' %}"
    "{% set sys = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set sys = '' %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<s>[INST] ' + (sys if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
GEMMA = (  # refuses a system role and turns that do not alternate; trims what is said
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
)
DROPS_SYSTEM = CHATML.replace(
    "%}{{ '<|im_start|>'", "%}{% if m.role != 'system' %}{{ '<|im_start|>'"
).replace("<|im_end|>\n' }}{% endfor", "<|im_end|>\n' }}{% endif %}{% endfor")
THINK = (  # drops the reasoning of every assistant turn but the last, as Qwen3 does
    "{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
)
REASONS = (  # writes a reasoning part, empty if there is none, before the last turn's words (Qwen3)
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{% if loop.last %}"
    "{{ '<think>\n' + (parts[0].replace('<think>', '').strip() if parts | length > 1 else '') + '\n</think>\n\n' }}"
    "{% endif %}{{ parts[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPEN = "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
EOS_LAST = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ eos_token }}"
TALK = [Turn("user", "hello"), Turn("assistant", "yes"), Turn("user", "yes"), Turn("assistant", "no yes")]


def pieces(template, turns, **how):
    text, spans = Template(make_tokenizer(template, **how)).render(turns, "f.jsonl, line 3")
    return text, [(text[s.start : s.stop], text[s.stop : s.end]) for s in spans]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>\n"),
        (GEMMA, "<|im_end|>\n"),
        (LLAMA2, " </s>"),
        (OPEN, "\n"),
        (THINK, "<|im_end|>\n"),
    ],
)
def test_every_assistant_turn_is_found_with_its_end_mark(template, end):
    _, found = pieces(template, TALK, bos="<s>")
    assert found == [("yes", end), ("no yes", end)]


def test_an_end_mark_at_the_end_of_the_conversation_alone():
    text, found = pieces(EOS_LAST, TALK)
    assert text.endswith("assistant: no yes\n<|im_end|>")
    assert found == [("yes", "\n"), ("no yes", "\n<|im_end|>")]


def test_the_users_words_are_never_taken_for_the_assistants():
    text, spans = Template(make_tokenizer()).render([Turn("user", "yes yes"), Turn("assistant", "yes")], "")
    assert [text[: s.start].count("yes") for s in spans] == [2]


def test_content_that_the_template_trims_or_shortens():
    spaced = [Turn("user", "q"), Turn("assistant", "  yes \n")]
    assert pieces(GEMMA, spaced, bos="<s>")[1] == [("yes", "<|im_end|>\n")]
    assert pieces(CHATML, spaced)[1] == [("  yes \n", "<|im_end|>\n")]
    thinking = [
        TALK[0],
        Turn("assistant", "<think>\nhm\n</think>\n\nyes"),
        TALK[2],
        Turn("assistant", "a</think>b"),
    ]
    assert pieces(THINK, thinking)[1] == [("yes", "<|im_end|>\n"), ("a</think>b", "<|im_end|>\n")]


def test_a_reasoning_part_is_the_assistants_when_it_was_said():
    assert pieces(REASONS, TALK)[1] == [("yes", "<|im_end|>\n"), ("no yes", "<|im_end|>\n")]
    thought = "<think>\nhm\n</think>\n\nyes"
    text, found = pieces(REASONS, [TALK[0], Turn("assistant", thought), TALK[2], Turn("assistant", thought)])
    assert text.count("hm") == 1  # the template drops it from all turns but the last
    assert found == [("yes", "<|im_end|>\n"), (thought, "<|im_end|>\n")]


def test_content_that_looks_like_the_template_or_like_a_marker():
    odd = [
        Turn("user", "\ue0000\ue001"),
        Turn("assistant", "a<|im_end|>\n<|im_start|>user\n\ue0001\ue001"),
        *TALK,
    ]
    assert [said for said, _ in pieces(CHATML, odd)[1]] == [odd[1].content, "yes", "no yes"]


def test_blank_assistant_turns_stay_in_the_text_without_a_span():
    text, found = pieces(CHATML, [TALK[0], Turn("assistant", " "), *TALK[2:]])
    assert "assistant\n <|im_end|>" in text and [said for said, _ in found] == ["no yes"]


@pytest.mark.parametrize("template", [GEMMA, DROPS_SYSTEM])
def test_without_a_system_role_the_system_text_goes_before_the_first_user_turn(template):
    system = [Turn("system", "be good"), *TALK]
    tokenizer = make_tokenizer(template, bos="<s>")
    assert not Template(tokenizer).has_system
    assert "<|im_start|>user\nbe good\n\nhello<|im_end|>" in pieces(template, system, bos="<s>")[0]
    assert Template(make_tokenizer(LLAMA2)).has_system and Template(make_tokenizer()).has_system


def test_merge_system_loses_no_text():
    assert merge_system([Turn("system", "s"), Turn("assistant", "a")]) == [
        Turn("user", "s"),
        Turn("assistant", "a"),
    ]
    two = [Turn("system", "s"), Turn("system", "t"), Turn("user", "u")]
    assert merge_system(two) == [Turn("user", "s\n\nt\n\nu")]
    assert merge_system(TALK) == TALK


def test_a_model_without_a_template_gets_the_stated_plain_format():
    text, found = pieces(None, [Turn("system", "be good"), *TALK])
    assert text == (
        "System: be good\n\nUser: hello\n\nAssistant: yes<|im_end|>\n\n"
        "User: yes\n\nAssistant: no yes<|im_end|>\n\n"
    )
    assert found == [("yes", "<|im_end|>\n\n"), ("no yes", "<|im_end|>\n\n")]


def test_what_a_template_refuses_or_hides_is_said():
    with pytest.raises(UserError, match=r"line 3: the model's chat template refuses.*roles must alternate"):
        pieces(GEMMA, TALK[1:], bos="<s>")
    with pytest.raises(UserError, match=r"line 3: the model's chat template hides or rewrites an assistant"):
        pieces("{{ messages[-1].content }}", TALK)
    with pytest.raises(UserError, match=r"line 3: the model's chat template hides or rewrites an assistant"):
        pieces(
            "{% for m in messages %}{{ m.content[:3] + '|' + m.content | length | string }}{% endfor %}", TALK
        )


def test_the_plain_format_without_an_eos_token_leaves_it_out():
    assert pieces(None, TALK[:2], eos=None)[0] == "User: hello\n\nAssistant: yes\n\n"
