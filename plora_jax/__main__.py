"""`python -m plora_jax` is the command `plora`."""

from plora_jax.cli import command

command()
