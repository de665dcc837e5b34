"""`python -m plora_jax` is the command `plora`."""

import sys

from plora_jax.cli import main

sys.exit(main())
