"""Splits models that are too large for one device, and trains them as a pipeline.

    from shoal.pipelining import pipeline
    stage = pipeline(model, example_inputs, mesh=mesh["pp"], microbatches=8, schedule="interleaved")
    optimizer = torch.optim.AdamW(stage.module.parameters())
    loss = stage.step(**batch)  # forward and backward of all micro-batches
    optimizer.step()

A step, part by part:

1.  ``export_graph`` traces the model into one graph, and ``units`` finds the places where few bytes cross
    from one part of it to the next (``dataflow``).
2.  ``measure_cost`` (or ``roofline``, for a model on the meta device) measures the cost of each unit;
    ``decide.autotune`` cuts the model, simulates the schedules with these costs, and takes the best that
    fits. The first rank decides, and ``pipeline_plan`` sends its decision to the others.
3.  ``split`` makes the stages. A value that is needed later is relayed hop by hop; masks and positions are
    recomputed where they are needed; a weight that several stages use is one parameter in all of them.
    Layers for which the model has activation checkpointing on keep it (``recompute``).
4.  ``device_placement`` moves this rank's stages to its device, sharded over the replicas if asked for, and
    ``state_dict`` holds their parameters under the names of the unsplit model.
5.  ``Pipeline.step`` divides the batch into micro-batches and weights their losses (``loss``), and
    ``adapter`` runs them through torch's schedule runtime in the order of the plan, with random numbers
    from ``random_streams``.
6.  When a stage has done its last backward pass, ``replicas`` sums its gradients over the data-parallel
    replicas, and at the end ``tied_weights`` those of weights that stages of several ranks share.
7.  ``trace`` measures the step, ``explain`` prints it beside the prediction, ``verify`` compares the first
    step with the unsplit model, and ``failure_detector`` names a worker that died.
"""

from shoal.pipelining.api import make_mesh, pipeline
from shoal.pipelining.auto import AutoLayout, auto_layout
from shoal.pipelining.runtime import Evaluation, Pipeline

__all__ = ["AutoLayout", "Evaluation", "Pipeline", "auto_layout", "make_mesh", "pipeline"]
