"""``shoal plan``: what a run takes before a machine is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def plan(
    recipe: str = "",
    /,
    *,
    cluster: str,
    helpers: str | None = None,
    goal: Literal["time", "cost"] = "time",
    global_batch: int | None = None,
    sequence_length: int | None = None,
    model: str | None = None,
    algorithm: str | None = None,
    throughput: float | None = None,
    measured: list[Path] | None = None,
    start_s: float = 120.0,
    compare: bool = False,
    sweep: str | None = None,
    page: Path | None = None,
    trace: Path | None = None,
    json: Path | None = None,
    catalog: list[Path] | None = None,
) -> int:
    """Predict time, cost, memory and scaling of a training run before a machine is rented.

    For example: shoal plan bert-large --cluster 256xp3dn.24xlarge --helpers 64xc5n.18xlarge

    Parameters
    ----------
    recipe
        What to train: resnet50, mask-rcnn, bert-large, albert-base, t5-3b, gpt-13b, ...
    cluster
        The machines that train, like 256xp3dn.24xlarge.
    helpers
        CPU hosts with summation servers, like 64xc5n.18xlarge.
    goal
        What the best plan has the least of.
    global_batch
        Samples a step; default: the recipe's own, or the largest known to reach the target that divides.
    sequence_length
        Tokens a sample, for recipes of one phase.
    model
        A model of yours instead of a recipe, as module:function; the function returns the model, a dict of
        its inputs and the number of samples in them. Needs --global-batch.
    algorithm
        Plan with this one only: ring, hierarchical-ring, tree, two-hop or two-hop-helpers.
    throughput
        Samples a second that you measured on one host of the cluster with this recipe.
    measured
        Files of `shoal bench train --json` (this recipe on one host) and of `shoal bench comm --json`
        (all-reduces between hosts): what you measured instead of what is published.
    start_s
        Seconds from starting the processes to the first step.
    compare
        Put all algorithms side by side.
    sweep
        Numbers of hosts to draw the scaling curve over, like nodes=1..256.
    page
        Write the plan, and the curve of --sweep, as an HTML page.
    trace
        Write the predicted step as a Chrome trace.
    json
        Write everything as JSON.
    catalog
        Files with instance types of yours.
    """
    from shoal.cli.planning import Request, run

    request = Request(
        recipe=recipe,
        cluster=cluster,
        helpers=helpers,
        goal=goal,
        global_batch=global_batch,
        sequence_length=sequence_length,
        model=model,
        algorithm=algorithm,
        throughput=throughput,
        start_s=start_s,
        compare=compare,
        sweep=sweep,
        page=page,
        trace=trace,
        json=json,
        catalog=tuple(catalog or ()),
        measured=tuple(measured or ()),
    )
    return run(request)
