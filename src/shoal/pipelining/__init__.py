"""Models too large for one device: split by themselves, trained as a pipeline.

    from shoal.pipelining import pipeline
    stage = pipeline(model, example_inputs, mesh=mesh["pp"], microbatches=8, schedule="interleaved")
    optimizer = torch.optim.AdamW(stage.module.parameters())
    loss = stage.step(**batch)  # forward and backward of all micro-batches
    optimizer.step()

The story of a step:

1.  ``export_graph`` traces the model into one graph, and ``units`` finds where little has to travel from one
    part of it to the next.
2.  ``measure_cost`` (or ``roofline``, for a model on the meta device) says what each unit costs;
    ``decide.autotune`` cuts the model, simulates the schedules with these costs, and takes the best that
    fits. The first rank decides, and ``pipeline_plan`` tells the others.
3.  ``split`` makes the stages. A value that is needed later travels hop by hop; masks and positions are
    computed again where they are needed; a weight that several stages use is one parameter in all of them.
4.  ``device_placement`` puts this rank's stages on its device, sharded over the replicas if asked for, and
    ``state_dict`` holds their parameters under the names of the unsplit model.
5.  ``step`` divides the batch into micro-batches (``loss`` says how each counts), and ``adapter`` runs them
    through torch's schedule runtime, in the order of the plan, random numbers drawn from
    ``random_streams``.
6.  When a stage has done its last backward pass, ``replicas`` adds up its gradients over the data-parallel
    replicas, and at the end ``tied_weights`` those of weights that stages of several ranks share.
7.  ``trace`` measures what happened, ``explain`` prints it beside the prediction, ``verify`` compares the
    first step with the unsplit model, and ``failure_detector`` names a worker that dies.
"""

from shoal.pipelining.api import make_mesh, pipeline
from shoal.pipelining.auto import AutoLayout, auto_layout
from shoal.pipelining.runtime import Evaluation, Pipeline

__all__ = ["AutoLayout", "Evaluation", "Pipeline", "auto_layout", "make_mesh", "pipeline"]
