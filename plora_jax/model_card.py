"""The README of an exported adapter: what it is, how to load it, and every field of its job."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

from plora_jax.jobs import Job

_ROUNDED = (
    " The base's weights were rounded to fp8 for it, and its scores are with them (`plora eval --base fp8`); it loads "
    "on the base as it is."
)
_VLLM_DEFAULT = 16  # vLLM's default of --max-lora-rank
_VLLM_RANKS = (32, 64, 128, 256, 320, 512)  # the larger values that it accepts


def model_card(base_name: str, job: Job, largest_rank: int, precision: str = "") -> str:
    """Return a model card in Markdown, with the front matter of the Hugging Face hub.

    `precision` is that of the base it was trained on, told where weights were rounded for it ("fp8").
    """
    hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", base_name) and not Path(base_name).exists()
    values = job.to_dict()
    patterned = bool(job.rank_pattern or job.alpha_pattern)
    sentence, command = vllm_command(base_name, "THIS_DIRECTORY", largest_rank, patterned)
    table = "\n".join(f"| {f.name} | `{values[f.name]}` | {f.metadata['doc']} |" for f in fields(job))
    return f"""---
{f"base_model: {base_name}" if hub_name else "# base_model: a local model"}
library_name: peft
pipeline_tag: text-generation
tags: [lora]
---

# LoRA adapter for {base_name}

Trained with plora_jax.{_ROUNDED if precision == "fp8" else ""} In PEFT:

```python
{peft_code(base_name, "THIS_DIRECTORY")}
```

{sentence}{
        f'''

```sh
{command}
```'''
        if command
        else ""
    }

| field | value | meaning |
|---|---|---|
{table}
"""


def peft_code(base_name: str, adapter: str) -> str:
    """Return the Python that loads an adapter's directory onto its base in PEFT."""
    return f"""from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({_where(base_name)})
model = PeftModel.from_pretrained(base, {adapter!r})"""


def _where(base_name: str) -> str:
    """Return the arguments by which transformers finds the base; of a .gguf file it wants folder and name."""
    if not base_name.endswith(".gguf"):
        return repr(base_name)
    return f"{str(Path(base_name).parent)!r}, gguf_file={Path(base_name).name!r}"


def vllm_command(
    base_name: str, adapter: str, largest_rank: int, patterned: bool, name: str = "NAME"
) -> tuple[str, str]:
    """Return a sentence on serving an adapter in vLLM, and the command; an empty one where it must be merged first.

    `patterned` says that single modules have ranks or alphas of their own.
    """
    if patterned:
        return (
            "vLLM reads one rank and one alpha for a whole adapter: for vLLM, merge this one (`plora merge`).",
            "",
        )
    limit = next((rank for rank in _VLLM_RANKS if rank >= largest_rank), None)
    if limit is None:
        return (
            f"Its rank, {largest_rank}, is above what vLLM serves: for vLLM, merge it (`plora merge`).",
            "",
        )
    module = shlex.quote(f"{name}={adapter}")
    command = f"vllm serve {shlex.quote(base_name)} --enable-lora --lora-modules {module}"
    if largest_rank <= _VLLM_DEFAULT:
        return "In vLLM:", command
    return (
        f"In vLLM, whose default limit of {_VLLM_DEFAULT} this rank exceeds, with `--max-lora-rank`:",
        f"{command} --max-lora-rank {limit}",
    )
