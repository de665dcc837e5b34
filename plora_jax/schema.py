"""Read YAML strictly and check its values against dataclass fields, so that every fault is told at once."""

import difflib
import math
import re
import reprlib
import types
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from plora_jax.errors import UserError

Path_ = tuple[str | int, ...]  # where a value stands: ("search", "rank", 2)

SPOKEN = {  # what users of other tools write, and the word here
    "lr": "learning_rate",
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "lora_target_modules": "targets",
    "bs": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "lr_scheduler": "scheduler",
    "lr_scheduler_type": "scheduler",
    "warmup": "warmup_ratio",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "optim": "optimizer",
    "base_model": "model",
    "val": "eval",
    "validation": "eval",
    "dataset": "data",
    "datasets": "data",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "num_samples": "sample",
    "n": "sample",
}


class Faults:
    """Collect what is wrong in one file; `check` raises all of it as one UserError."""

    def __init__(self, source: str, lines: dict[Path_, int] | None = None) -> None:
        self.source = source
        self.lines = lines or {}
        self.found: list[str] = []

    def add(self, where: Path_, message: str) -> None:
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


def dotted(where: Path_) -> str:
    """Write a place as a reader would: search.rank[2]."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")


def shown(value: Any) -> str:
    """Show a value from the file in a message, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {reprlib.repr(value)}"
    return reprlib.repr(value)


# --- reading ---------------------------------------------------------------------------------------------------


class _Core(yaml.SafeLoader):
    """Resolve plain scalars by YAML 1.2's core schema: 2e-5 is a number; yes, 1:30 and 2020-01-01 are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)


_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
for _name, _regexp in [
    ("null", re.compile(r"(~|null|Null|NULL|)\Z")),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")),
    ("int", re.compile(rf"({_INT.pattern})\Z")),
    ("float", re.compile(rf"({_FLOAT.pattern})\Z")),
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
        case "float" if _FLOAT.fullmatch(text):
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    raise ValueError(
        f"{text!r} under the tag {node.tag} is not accepted; write plain text, numbers, true, false or null"
    )


def _build(node: yaml.Node, where: Path_, faults: Faults, done: dict[int, Any]) -> Any:
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


_Plain.add_implicit_resolver(_TAG + "float", re.compile(rf"({_FLOAT.pattern})\Z"), None)
_Plain.add_implicit_resolver(_TAG + "int", re.compile(rf"({_INT.pattern})\Z"), None)


def dump_yaml(value: Any) -> str:
    """Write plain values as YAML text that `parse_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110)


# --- checking --------------------------------------------------------------------------------------------------


def _bounds(meta: Any) -> str:
    low, high = (end if end is None else f"{end:.15g}" for end in (meta.get("low"), meta.get("high")))
    if low is None:
        return "" if high is None else f" ≤ {high}"
    above = f"{'>' if meta.get('open_low') else '≥'} {low}"
    return (
        f" {above}"
        if high is None
        else f" {above} and ≤ {high}"
        if meta.get("open_low")
        else f" from {low} to {high}"
    )


def allowed(kind: Any, meta: Any) -> str:
    """Say in words what a field of this annotation and metadata accepts."""
    origin, args = get_origin(kind), get_args(kind)
    if meta.get("allowed"):
        return str(meta["allowed"])
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin in (Union, types.UnionType):
        rest = [arg for arg in args if arg is not types.NoneType]
        words = " or ".join(allowed(arg, meta) for arg in rest)
        return words + " or null" if len(rest) < len(args) else words
    if origin is tuple and get_origin(args[0]) is tuple:
        return f"a mapping from module pattern to {allowed(get_args(args[0])[1], meta)}"
    if origin is tuple:
        return f"a list, each {allowed(args[0], meta)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind] + (
        _bounds(meta) if kind in (int, float) else ""
    )


def convert(value: Any, kind: Any, meta: Any) -> Any:
    """Return the value in the annotation's own type, or raise ValueError saying what is wrong and what is allowed."""
    if hasattr(value, "item") and not isinstance(value, (str, dict)):  # a NumPy scalar from a library call
        value = value.item()
    origin, args = get_origin(kind), get_args(kind)
    wrong = ValueError(f"{shown(value)} is not allowed here; expected {allowed(kind, meta)}")
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        members = [arg for arg in args if arg is not types.NoneType]
        if len(members) == 1:
            return convert(value, members[0], meta)
        for member in members:
            try:
                return convert(value, member, meta)
            except ValueError:
                continue
        raise wrong
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        near = difflib.get_close_matches(value, args, 1) if isinstance(value, str) else []
        raise ValueError(
            f"{shown(value)} is not known{f' (did you mean {near[0]}?)' if near else ''}; {allowed(kind, meta)}"
        )
    if origin is tuple and get_origin(args[0]) is tuple:
        if isinstance(value, (tuple, list)) and all(
            isinstance(v, (tuple, list)) and len(v) == 2 for v in value
        ):
            value = dict(value)
        if not isinstance(value, dict) or not all(isinstance(key, str) and key for key in value):
            raise wrong
        item = get_args(args[0])[1]
        return tuple(sorted((key, convert(v, item, meta)) for key, v in value.items()))
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise wrong
        return tuple(_item(i, v, args[0], meta) for i, v in enumerate(value))
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise wrong
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{shown(value)} is not text; expected {allowed(kind, meta)}, in quotes if need be")
    if isinstance(value, str) and _FLOAT.fullmatch(value.strip()):
        raise ValueError(f"{shown(value)} is text; write the number without quotes, as {value.strip()}")
    if not isinstance(value, (int, float)) or (kind is int and not isinstance(value, int)):
        raise wrong
    low, high = meta.get("low"), meta.get("high")
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong
    if low is not None and (value < low or (meta.get("open_low") and value == low)):
        raise ValueError(f"{value} is too small; expected {allowed(kind, meta)}")
    if high is not None and value > high:
        raise ValueError(f"{value} is too large; expected {allowed(kind, meta)}")
    try:
        return kind(value)
    except OverflowError:
        raise wrong from None


def _item(index: int, value: Any, kind: Any, meta: Any) -> Any:
    try:
        return convert(value, kind, meta)
    except ValueError as error:
        raise ValueError(f"item {index}: {error}") from None


def unknown(key: str, known: list[str], elsewhere: dict[str, str] | None = None) -> str:
    """Say that a key is not known, what was probably meant, or where it belongs."""
    meant = SPOKEN.get(key.lower().replace("-", "_"))
    near = (
        [meant] if meant in known else difflib.get_close_matches(key.lower().replace("-", "_"), known, 1, 0.7)
    )
    if near:
        return f"unknown key; did you mean {near[0]}?"
    belongs = (elsewhere or {}).get(meant or key) or (elsewhere or {}).get(key)
    if belongs:
        return f"unknown key here; {meant or key} belongs under {belongs}"
    return f"unknown key; known here: {', '.join(known)}"


def section(
    raw: Any, where: Path_, known: dict[str, Field[Any]], faults: Faults, elsewhere: dict[str, str]
) -> dict[str, Any]:
    """Check a mapping against dataclass fields and return its values that hold; the rest are noted as faults."""
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        faults.add(where, f"{shown(raw)} is not a mapping; known keys: {', '.join(known)}")
        return {}
    out = {}
    for key, value in raw.items():
        if key not in known:
            faults.add((*where, key), unknown(key, list(known), elsewhere))
            continue
        try:
            out[key] = convert(value, known[key].type, known[key].metadata)
        except ValueError as error:
            faults.add((*where, key), str(error))
    for name, spec in known.items():
        if name not in raw and spec.default is MISSING and spec.default_factory is MISSING:
            faults.add((*where, name), f"is missing; expected {allowed(spec.type, spec.metadata)}")
    return out
