"""A conversation as text through the model's own chat template, with the characters of each assistant turn.

The characters are found by rendering twice: once with a marker in place of every assistant turn, which shows
the text that the template itself puts around them, and once for real. No token is ever searched for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from plora_jax.data.files import one_line
from plora_jax.data.formats import Turn
from plora_jax.errors import UserError

# The stated format of a model without a template; every assistant turn ends with the model's EOS.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\n\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters: no tokenizer or template gives them a meaning


class Span(NamedTuple):
    """Mark one assistant turn in a text: its content is [start, stop), its end mark lies in [stop, end)."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class Template:
    """Render conversations for one tokenizer (its own template, else the stated plain format)."""

    tokenizer: Any

    @cached_property
    def plain(self) -> bool:
        """Tell whether the tokenizer has no template of its own."""
        return not getattr(self.tokenizer, "chat_template", None)

    @cached_property
    def has_system(self) -> bool:
        """Tell whether a system turn shows up in what the template renders (some refuse it, some drop it)."""
        try:
            return _OPEN in self._apply([Turn("system", _OPEN), Turn("user", "a")])
        except Exception:  # a template refuses a role by raising, each through its own jinja error
            return False

    @cached_property
    def tail(self) -> str:
        """Give the text after a conversation's last turn, the assistant's: its end mark comes first."""
        try:
            return self._apply([Turn("user", "a"), Turn("assistant", _OPEN)]).partition(_OPEN)[2]
        except Exception:
            return ""

    def _apply(self, turns: Sequence[Turn], header: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            [t._asdict() for t in turns],
            tokenize=False,
            add_generation_prompt=header,
            chat_template=PLAIN if self.plain else None,
        )

    def render(self, turns: Sequence[Turn], where: str) -> tuple[str, list[Span]]:
        """Return the conversation's text and one Span for each assistant turn that is not blank.

        A system turn goes in front of the first user turn when the template knows no system role. UserError
        when the template refuses the conversation (roles that do not alternate, say), or hides a turn.
        """
        if not self.has_system:
            turns = merge_system(turns)
        spoken = [i for i, t in enumerate(turns) if t.role == "assistant" and t.content.strip()]
        opening = _OPEN
        while any(opening in t.content for t in turns):  # no text of the data may pass for a marker
            opening += _OPEN
        marks = {i: f"{opening}{n}{_CLOSE}" for n, i in enumerate(spoken)}
        marked = [t._replace(content=marks[i]) if i in marks else t for i, t in enumerate(turns)]
        try:
            text, skeleton = self._apply(turns), self._apply(marked)
            contents = [turns[i].content for i in spoken]
            spans = self._between(text, skeleton, contents, list(marks.values()))
            spans = spans or self._after_headers(text, turns, spoken)
        except Exception as error:
            raise UserError(
                f"{where}: the model's chat template refuses the conversation: {one_line(error)}."
            ) from None
        if spans is None:
            raise UserError(
                f"{where}: the model's chat template hides or rewrites an assistant turn, so that its words "
                "cannot be told from the rest."
            )
        return text, spans

    def _between(
        self, text: str, skeleton: str, contents: Sequence[str], marks: Sequence[str]
    ) -> list[Span] | None:
        """Find the turns between the texts that stand around the markers; None if the template moved those."""
        around = []
        for mark in marks:
            before, found, skeleton = skeleton.partition(mark)
            if not found:
                return None
            around.append(before)
        around.append(skeleton)
        spans, at = [], 0
        for n, content in enumerate(contents):
            after, start = around[n + 1], at + len(around[n])
            stop = _content_end(text, start, content, after, last=n + 1 == len(contents))
            if stop is None or text[at:start] != around[n]:
                return None
            spans.append(Span(start, stop, stop + _agreement(self.tail, after)))
            at = stop
        return spans

    def _after_headers(self, text: str, turns: Sequence[Turn], spoken: Sequence[int]) -> list[Span] | None:
        """Find the turns after the headers that the template writes for generation, up to the turn's end mark.

        Some templates write more around an assistant's words once they see them (an empty reasoning part).
        """
        spans: list[Span] = []
        for i in spoken:
            header = self._apply(turns[:i], header=True)
            stop = text.find(self.tail, len(header)) if i != spoken[-1] else text.rfind(self.tail)
            if not self.tail or not text.startswith(header) or stop <= len(header):
                return None
            spans.append(Span(len(header), stop, stop + len(self.tail)))
        return spans


def _agreement(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _content_end(text: str, start: int, content: str, after: str, last: bool) -> int | None:
    for kept in (content, content.strip(), content.lstrip(), content.rstrip()):
        stop = start + len(kept)
        if text.startswith(kept, start) and (text[stop:] == after if last else text.startswith(after, stop)):
            return stop
    # the template changed the content (dropped its reasoning, say): it ends where the template's text goes on
    stop = len(text) - len(after) if last else text.find(after, start)
    return stop if stop >= start and text.startswith(after, stop) else None


def merge_system(turns: Sequence[Turn]) -> list[Turn]:
    """Put the text of system turns in front of the next user turn, two line ends between them."""
    out: list[Turn] = []
    held: list[str] = []
    for turn in turns:
        if turn.role == "system":
            held.append(turn.content)
        elif turn.role == "user" and held:
            out.append(Turn("user", "\n\n".join([*held, turn.content])))
            held = []
        else:
            if held:
                out.append(Turn("user", "\n\n".join(held)))
                held = []
            out.append(turn)
    return out
