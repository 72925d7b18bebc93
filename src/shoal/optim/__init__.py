"""Large-batch optimizers and learning-rate schedules, all in optimizer steps."""
