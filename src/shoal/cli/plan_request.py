"""What ``shoal plan`` is asked: its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``shoal plan``."""

    cluster: str
    """The machines that train, like 256xp3dn.24xlarge."""
    helpers: str | None = None
    """CPU hosts with summation servers, like 64xc5n.18xlarge."""
    goal: Literal["time", "cost"] = "time"
    """What the best plan has the least of."""
    global_batch: int | None = None
    """Samples a step; default: the recipe's own, or the largest known to reach the target that divides."""
    sequence_length: int | None = None
    """Tokens a sample, for recipes of one phase."""
    model: str | None = None
    """A model of yours instead of a recipe, as module:function; the function returns the model, a dict of its
    inputs and the number of samples in them. Needs --global-batch."""
    algorithm: str | None = None
    """Plan with this one only: ring, hierarchical-ring, tree, two-hop or two-hop-helpers."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Precision of gradients on the network; `shoal train` sends fp32."""
    throughput: float | None = None
    """Samples a second that you measured on one host of the cluster with this recipe."""
    measured: tuple[Path, ...] = ()
    """Files of `shoal bench train --json` (this recipe on one host) and of `shoal bench comm --json`
    (all-reduces between hosts): what you measured instead of what is published."""
    start_s: float = 120.0
    """Seconds from starting the processes to the first step."""
    compare: bool = False
    """Put all algorithms side by side."""
    sweep: str | None = None
    """Numbers of hosts to draw the scaling curve over, like nodes=1..256."""
    page: Path | None = None
    """Write the plan, and the curve of --sweep, as an HTML page."""
    trace: Path | None = None
    """Write the predicted step as a Chrome trace."""
    json: Path | None = None
    """Write everything as JSON."""
    catalog: tuple[Path, ...] = ()
    """Files with instance types of yours."""
