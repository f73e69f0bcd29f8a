"""What surrounds the recipe: launcher, ranks, options, checks, log, checkpoints, CPU choices."""

import data  # noqa: F401 (consoles of any encoding)
