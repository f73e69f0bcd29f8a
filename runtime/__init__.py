"""What surrounds the recipe: launcher, ranks, options, checks, log, checkpoints, CPU choices."""
