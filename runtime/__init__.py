"""What makes two runs comparable: options, ranks, log, clock, checkpoints, start and stop. Nothing here imports the recipe."""
