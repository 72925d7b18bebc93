"""Defines ``shoal cluster write``: files from which AWS's own tools make a cluster."""

# Annotations are objects here, not texts: cyclopts reads those of the settings.

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from
from shoal.errors import EXIT_OK, UsageError, did_you_mean
from shoal.launch import cloudformation as stacks
from shoal.launch import parallelcluster as parallel
from shoal.launch.aws_checks import allowed
from shoal.launch.cloudformation import CloudFormation
from shoal.launch.parallelcluster import ParallelCluster

_FSX_PER_GB_MONTH = 0.21
"""US dollars of persistent SSD storage at 250 MB/s per TiB in us-east-1; recalled, not confirmed."""
_HOURS_A_MONTH = 730

cluster = App(name="cluster")
write = App(
    name="write", help="Write configuration files; create nothing.", config=(settings_from(lambda _: ""),)
)
cluster.command(write)


@write.command
def parallelcluster(
    *,
    plan: Annotated[ParallelCluster, Parameter(name="*")],
    out: Path,
    config: Path | None = None,
) -> int:
    """Write a Slurm cluster for AWS ParallelCluster 3: workers with EFA, helpers, FSx for Lustre over S3.

    Parameters
    ----------
    out
        Folder for cluster.yaml.
    config
        TOML file with options of this command, such as region = "us-east-1".
    """
    _check_instances(plan)
    out.mkdir(parents=True, exist_ok=True)
    path = out / parallel.CONFIGURATION
    path.write_text(parallel.render(plan), encoding="utf-8")
    print(path)
    name = f"--cluster-name {plan.name} --region {plan.region}"
    print(f"check it:  pcluster create-cluster {name} --cluster-configuration {path} --dryrun true")
    print(f"make it:   pcluster create-cluster {name} --cluster-configuration {path}")
    print(f"log in:    pcluster ssh {name} -i KEYFILE -L 6006:localhost:6006")
    print(
        f"delete it: pcluster delete-cluster {name}; the file system stays, and costs until it is deleted too"
    )
    print(f"an hour of the file system: {_file_system_price(plan)}")
    print(f"an hour of the head node: {_price((plan.head_instance, 1))}")
    print(f"an hour with all hosts: {_price(*_hosts(plan))}; they run only while jobs want them")
    return EXIT_OK


@write.command
def cloudformation(
    *,
    plan: Annotated[CloudFormation, Parameter(name="*")],
    out: Path,
    config: Path | None = None,
) -> int:
    """Write two CloudFormation stacks: FSx for Lustre over S3 with a data host, then hosts with EFA.

    The hosts have no scheduler: `shoal submit ssh` on the data host starts jobs. Prepare the data there
    before you create the second stack, whose hosts are charged from their first minute.

    Parameters
    ----------
    out
        Folder for filesystem.yaml and cluster.yaml.
    config
        TOML file with options of this command, such as region = "us-east-1".
    """
    _check_instances(plan)
    out.mkdir(parents=True, exist_ok=True)
    for file, text in stacks.render(plan).items():
        (out / file).write_text(text, encoding="utf-8")
        print(out / file)
    print("make them, one after the other:")
    for file in (stacks.FILE_SYSTEM, stacks.CLUSTER):
        print(f"    {stacks.create_stack(plan, file, str(out / file))}")
    print(f"the data host: {stacks.ask_data_host(plan)}")
    print("delete them, the cluster first; the second takes all runs with it, but not the bucket:")
    for file in (stacks.CLUSTER, stacks.FILE_SYSTEM):
        print(f"    {stacks.delete_stack(plan, file)}")
    print(f"an hour of the file system: {_file_system_price(plan)}")
    print(f"an hour of the data host: {_price((plan.data_instance, 1))}")
    print(f"an hour of the cluster: {_price(*_hosts(plan))}")
    return EXIT_OK


def _check_instances(plan: ParallelCluster | CloudFormation) -> None:
    """Compare the instance types with those that botocore knows, where it is installed.

    Raises:
        UsageError: it does not know one.
    """
    if find_spec("botocore") is None:
        return
    known = allowed("ec2", "InstanceType")
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name.endswith("_instance") and value not in known:
            raise UsageError(
                f"--{field.name.replace('_', '-')} {value!r} is no instance type that botocore knows; "
                f"upgrade boto3 if it is new.{did_you_mean(value, known)}"
            )


def _price(*hosts: tuple[str, int]) -> str:
    """Return the price of an hour of hosts, given as type and number, by the planner's catalog."""
    from shoal.planner.hardware import Catalog

    known, total, unpriced = Catalog().instances, 0.0, []
    for name, count in hosts:
        price = known[name].price_per_hour if name in known else None
        total += count * (price or 0.0)
        if count and price is None:
            unpriced.append(name)
    without = f", without {', '.join(unpriced)}" if unpriced else ""
    return f"${total:,.2f} on demand by shoal plan's catalog{without}"


def _hosts(plan: ParallelCluster | CloudFormation) -> tuple[tuple[str, int], ...]:
    return (plan.worker_instance, plan.workers), (plan.helper_instance, plan.helpers)


def _file_system_price(plan: ParallelCluster | CloudFormation) -> str:
    an_hour = plan.fsx_gb * _FSX_PER_GB_MONTH / _HOURS_A_MONTH
    return f"${an_hour:.2f}, a list price recalled and not confirmed"
