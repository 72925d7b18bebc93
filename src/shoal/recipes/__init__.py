"""One folder a model, one script a stage, each read from top to bottom."""
