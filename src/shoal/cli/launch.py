"""Defines ``shoal launch``: one host's part in a cluster's job."""

# Annotations are objects here, not texts: cyclopts reads those of the settings.

from typing import Annotated

from cyclopts import Parameter

from shoal.launch import sagemaker_host
from shoal.launch.in_job import HostOptions, in_job


def launch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[HostOptions, Parameter(name="*")] = HostOptions(),  # noqa: B008
) -> int:
    """Start the workers of a job on this host: `srun shoal launch -- python train.py`, once per host.

    The command runs once per worker with torchrun's variables, SHOAL_HELPERS and the job's secret. Exit code
    75: a signal asked to stop, and the workers saved. 76: another host is lost; start again to continue from
    the last checkpoint.

    Parameters
    ----------
    command
        The command of a worker and its arguments, after `--`.
    """
    start = sagemaker_host.run if sagemaker_host.is_here() else in_job
    return start(command, options)
