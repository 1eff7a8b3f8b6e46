"""What several tests share: models, checkpoints, ranks, runs."""
