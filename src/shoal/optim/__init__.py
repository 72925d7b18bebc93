"""Large-batch optimizers and learning-rate schedules, all in optimizer steps.

``optimizer_shards`` divides the state of any of them over data-parallel workers.
"""
