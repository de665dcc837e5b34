"""Write the tables of docs/models.md anew from the code that they describe: python -m scripts.docs_models"""

import re
from pathlib import Path

from plora_jax.models.describe import families_table, presets_table

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def page(text: str) -> str:
    """Return the page with its generated tables written anew."""
    for name, table in {"families": families_table(), "presets": presets_table()}.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE}: <!-- {name} --> … <!-- end --> is there {count} times, not once")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
