"""What must be the same for two runs to be comparable: options, ranks, log, clock, checkpoints, start and stop of a run.
Nothing here imports the recipe: train_gpt.py, or a copy of it, hands in what these files need."""
