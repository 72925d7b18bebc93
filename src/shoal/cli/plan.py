"""``shoal plan``: what a run takes before a machine is rented."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from shoal.cli.plan_request import Request


def plan(recipe: str = "", /, *, request: Annotated[Request, Parameter(name="*")]) -> int:
    """Predict time, cost, memory and scaling of a training run before a machine is rented.

    For example: shoal plan bert-large --cluster 256xp3dn.24xlarge --helpers 64xc5n.18xlarge

    Parameters
    ----------
    recipe
        What to train: resnet50, mask-rcnn, bert-large, albert-base, t5-3b, gpt-13b, ...
    """
    from shoal.cli.planning import run

    return run(recipe, request)
