"""Write the tables of docs/config.md anew from the fields they describe: python -m scripts.docs_config"""

import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from plora_jax.config import space
from plora_jax.config import sweep as config
from plora_jax.config.schema import allowed
from plora_jax.jobs import JOB_FIELDS

PAGE = Path(__file__).parent.parent / "docs" / "config.md"


def default(field: Field[Any]) -> str:
    """Say what holds when the field is not given."""
    value = field.default
    if value is MISSING:
        return "required"
    if value is None or value in ("", ()):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(described: Iterable[Field[Any]]) -> str:
    """Return a Markdown table of fields that carry their documentation."""
    rows = ["| field | allowed | default | meaning |", "|---|---|---|---|"]
    for field in described:
        words = allowed(field.type, field.metadata).removesuffix(" or null")
        rows.append(f"| `{field.name}` | {words} | {default(field)} | {field.metadata['doc']} |")
    return "\n".join(rows)


def conflicts() -> str:
    """List the pairs of which only one may be given, and the settings of one optimizer alone."""
    rows = [f"- `{one}` and `{other}`" for one, other in space.EXCLUDES]
    for name, readers in space.ONLY_WITH.items():
        rows.append(f"- `{name}` without `optimizer: {' or '.join(readers)}` on some job")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with every generated part written anew."""
    parts = {"job": table(JOB_FIELDS.values()), "conflicts": conflicts()}
    sections = {
        **config.SECTIONS,
        "search": space.SearchConfig,
        "budget": space.Budget,
        "train": space.TrainConfig,
        "sweep": config.Sweep,
    }
    for name, kind in sections.items():
        parts[name] = table(f for f in fields(kind) if f.metadata)
    for name, part in parts.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, p=part: f"{m[1]}{p}\n{m[2]}",
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(
                f"{PAGE}: the part <!-- {name} --> … <!-- end --> is there {count} times, not once"
            )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
