"""Read YAML strictly: core-schema values, no repeated keys, and the line of everything; write it back."""

import re
import reprlib
from pathlib import Path
from typing import Any

import yaml

from plora_jax.errors import UserError

MAX_BYTES = 16_000_000
Place = tuple[str | int, ...]  # where a value stands: ("search", "rank", 2)


class Faults:
    """Collect what is wrong in one file; `check` raises all of it as one UserError."""

    def __init__(self, source: str, lines: dict[Place, int] | None = None) -> None:
        self.source = source
        self.lines = lines or {}
        self.found: list[str] = []

    def add(self, where: Place, message: str) -> None:
        """Note a fault at a place, with its line when the file gave one."""
        line = next(
            (self.lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in self.lines), None
        )
        place = dotted(where) + (f" (line {line})" if line is not None else "")
        self.found.append(f"{place}: {message}" if place else message)

    def check(self) -> None:
        """Raise UserError naming every fault, or return."""
        if len(self.found) == 1:
            raise UserError(f"{self.source}: {self.found[0]}")
        if self.found:
            rows = "".join(f"\n  - {text}" for text in self.found)
            raise UserError(f"{self.source}: {len(self.found)} faults{rows}")


def dotted(where: Place) -> str:
    """Write a place as a reader would: search.rank[2]."""
    names = (part if isinstance(part, int) or part.isidentifier() else reprlib.repr(part) for part in where)
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).lstrip(".")


def shown(value: Any) -> str:
    """Show a value from the file in a message, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {reprlib.repr(value)}"
    return reprlib.repr(value)


class _Core(yaml.SafeLoader):
    """Resolve plain scalars by YAML 1.2's core schema: 2e-5 is a number; yes and 1:30 are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)


_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
for _name, _regexp in [
    ("null", re.compile(r"(~|null|Null|NULL|)\Z")),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")),
    ("int", re.compile(rf"({_INT.pattern})\Z")),
    ("float", re.compile(rf"({NUMBER.pattern})\Z")),
]:
    _Core.add_implicit_resolver(_TAG + _name, _regexp, None)


def _scalar(node: yaml.ScalarNode) -> Any:
    text, tag = node.value, node.tag.removeprefix(_TAG)
    match tag:
        case "str":
            return text
        case "null":
            return None
        case "bool" if text.lower() in ("true", "false"):
            return text.lower() == "true"
        case "int" if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float" if NUMBER.fullmatch(text):
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    raise ValueError(
        f"{text!r} under the tag {node.tag} is not accepted; write plain text, numbers, true, false or null"
    )


def _build(node: yaml.Node, where: Place, faults: Faults, done: dict[int, Any]) -> Any:
    """Turn a node into plain values; note lines, repeated keys and values that are not plain."""
    faults.lines.setdefault(where, node.start_mark.line + 1)
    if id(node) in done:  # an alias: its value is shared, and a node inside itself is seen as None
        return done[id(node)]
    done[id(node)] = None
    value: Any = None
    if isinstance(node, yaml.ScalarNode):
        try:
            value = _scalar(node)
        except ValueError as error:
            faults.add(where, str(error))
    elif isinstance(node, yaml.SequenceNode):
        value = [_build(item, (*where, i), faults, done) for i, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        value = {}
        for key_node, item in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            place = (*where, key)
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                faults.add(where, f"line {line} has a key that is not a word")
            elif key in value:
                faults.add(place, f"is given again in line {line}; keep one of them")
            else:
                faults.lines[place] = line
                value[key] = _build(item, place, faults, done)
    done[id(node)] = value
    return value


def read_yaml(path: Path) -> tuple[dict[str, Any], Faults]:
    """Read a YAML mapping and the faults found while reading it.

    Raises:
      UserError: the file is missing, is not UTF-8 or YAML, or does not hold one mapping.
    """
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: is larger than {MAX_BYTES:,} bytes; is it a data file?")
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory; give a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> tuple[dict[str, Any], Faults]:
    """Parse YAML text as `read_yaml` does; `source` names it in messages."""
    faults = Faults(source)
    try:
        node = yaml.compose(text, Loader=_Core)
        value = _build(node, (), faults, {}) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}: is not YAML{place}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: is not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{source}: is nested too deeply") from None
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds {shown(value)}"
        raise UserError(
            f"{source}: {what}; it must be a mapping with keys such as model, data, search and train"
        )
    return value, faults


class _Plain(yaml.SafeDumper):
    """Quote whatever either YAML version would read as something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write shared values out in full."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Plain.add_representer(str, _text)
_Plain.add_implicit_resolver(_TAG + "float", re.compile(rf"({NUMBER.pattern})\Z"), None)
_Plain.add_implicit_resolver(_TAG + "int", re.compile(rf"({_INT.pattern})\Z"), None)


def dump_yaml(value: Any) -> str:
    """Write plain values as YAML text that `parse_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110)
