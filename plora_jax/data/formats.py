"""Which of the accepted formats a row is in, and its text: turns, prompt and completion, or plain text."""

from typing import Any, Literal, NamedTuple

from plora_jax.data.read import Row, a_kind
from plora_jax.errors import UserError

Format = Literal["chat", "sharegpt", "prompt-completion", "alpaca", "text"]
FIELDS: dict[str, tuple[str, ...]] = {  # in order of precedence
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
ACCEPTED = "; ".join(f"{name} ({' + '.join(fields)})" for name, fields in FIELDS.items())
ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class Turn(NamedTuple):
    """Hold one turn of a conversation."""

    role: str
    content: str


class Record(NamedTuple):
    """Hold one row: a conversation's turns, else a prompt (empty for plain text) and a completion."""

    where: str
    format: str
    turns: tuple[Turn, ...]
    prompt: str
    completion: str
    choices: tuple[str, ...] | None

    @property
    def blank(self) -> bool:
        """Tell whether nothing is there to train on: every assistant turn, or the completion, is blank."""
        if self.turns:
            return not any(t.role == "assistant" and t.content.strip() for t in self.turns)
        return not self.completion.strip()


def too_long(where: str, tokens: int, max_length: int) -> UserError:
    """Return the error of a row of too many tokens, where `data.on_long` lets none pass."""
    return UserError(
        f"{where}: has {tokens} tokens, more than data.max_length {max_length} "
        "(data.on_long: truncate or drop lets it pass)."
    )


def detect(row: Row) -> str:
    """Return the format whose fields the row has (values that are null count as absent when another fits)."""
    fields = row.fields
    for present in (lambda f: fields.get(f) is not None, lambda f: f in fields):
        for name, needed in FIELDS.items():
            if all(present(f) for f in needed):
                return name
    some = next((name for name, needed in FIELDS.items() if any(f in fields for f in needed)), None)
    if some is not None:
        missing = next(f for f in FIELDS[some] if f not in fields)
        raise UserError(f"{row.where}: field {missing!r} is missing; the row has {_names(fields)}.")
    raise UserError(
        f"{row.where}: has none of the accepted fields, only {_names(fields)}. Accepted: {ACCEPTED}."
    )


def to_record(row: Row, format: str = "auto") -> Record:
    """Convert a row in the given (or detected) format; UserError names the place and the field at fault."""
    name = detect(row) if format == "auto" else format
    missing = [f for f in FIELDS[name] if f not in row.fields]
    if missing:
        raise UserError(
            f"{row.where}: field {missing[0]!r} of format {name} is missing; it has {_names(row.fields)}."
        )
    choices = _choices(row)
    if name in ("chat", "sharegpt"):
        return Record(row.where, name, _turns(row, name), "", "", choices)
    if name == "prompt-completion":
        return Record(row.where, name, (), _text(row, "prompt"), _text(row, "completion"), choices)
    if name == "text":
        return Record(row.where, name, (), "", _text(row, "text"), None)
    asked = _text(row, "instruction")
    if row.fields.get("input") is not None and (more := _text(row, "input")).strip():
        asked = f"{asked}\n\n{more}"
    return Record(
        row.where, name, (Turn("user", asked), Turn("assistant", _text(row, "output"))), "", "", choices
    )


def _names(fields: dict[str, Any]) -> str:
    return ", ".join(map(repr, fields)) or "no fields"


def _text(row: Row, name: str) -> str:
    return _check(row.where, name, row.fields[name])


def _check(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: field {name!r} holds {a_kind(value)} where text is due.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: field {name!r} holds half of a surrogate pair, which is no text."
        ) from None
    return value


def _choices(row: Row) -> tuple[str, ...] | None:
    value = row.fields.get("choices")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) < 2:
        raise UserError(f"{row.where}: field 'choices' must be a list of at least two texts.")
    return tuple(_check(row.where, f"choices[{i}]", v) for i, v in enumerate(value))


def _turns(row: Row, format: str) -> tuple[Turn, ...]:
    name = FIELDS[format][0]
    role_key, text_key = ("role", "content") if format == "chat" else ("from", "value")
    listed = row.fields[name]
    if not isinstance(listed, list) or not listed:
        what = "an empty list" if listed == [] else a_kind(listed)
        raise UserError(f"{row.where}: field {name!r} holds {what} where a list of turns is due.")
    turns = []
    for i, item in enumerate(listed):
        at = f"{name}[{i}]"
        if not isinstance(item, dict):
            raise UserError(
                f"{row.where}: {at} holds {a_kind(item)} where a turn {{{role_key!r}, {text_key!r}}} is due."
            )
        for key in (role_key, text_key):
            if key not in item:
                raise UserError(f"{row.where}: {at} has no field {key!r}; it has {_names(item)}.")
        role = item[role_key] if format == "chat" else _SHAREGPT.get(str(item[role_key]), item[role_key])
        if role not in ROLES:
            allowed = ROLES if format == "chat" else tuple(_SHAREGPT)
            raise UserError(
                f"{row.where}: {at}.{role_key} is {item[role_key]!r}; allowed: {', '.join(allowed)}."
            )
        if item.get("tool_calls"):
            raise UserError(f"{row.where}: {at}.tool_calls: calls of tools cannot be trained on, only text.")
        turns.append(Turn(role, _content(row.where, f"{at}.{text_key}", item[text_key])))
    if all(t.role != "assistant" for t in turns):
        raise UserError(
            f"{row.where}: field {name!r} has no assistant turn, so there is nothing to learn from it."
        )
    return tuple(turns)


def _content(where: str, at: str, value: Any) -> str:
    if not isinstance(value, list):
        return _check(where, at, value)
    parts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise UserError(f"{where}: {at}[{i}] is not a text part; only text can be trained on.")
        parts.append(_check(where, f"{at}[{i}].text", part["text"]))
    return "".join(parts)
