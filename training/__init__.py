"""Training: recipes, the loop, checkpoints and tracking. No Prefect."""
