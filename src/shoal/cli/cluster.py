"""Defines ``shoal cluster write``: files from which AWS's own tools make a cluster."""

# Annotations are objects here, not texts: cyclopts reads those of the settings.

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from
from shoal.errors import EXIT_OK, UsageError, did_you_mean
from shoal.launch.aws_checks import allowed
from shoal.launch.aws_cluster import CLUSTER, FILE_SYSTEM, CloudFormation, ParallelCluster
from shoal.launch.job_size import option

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
    _write(plan, out)
    name = f"--cluster-name {plan.name} --region {plan.region}"
    file = f"--cluster-configuration {out / CLUSTER}"
    print(f"check it:  pcluster create-cluster {name} {file} --dryrun true")
    print(f"make it:   pcluster create-cluster {name} {file}")
    print(f"log in:    pcluster ssh {name} -i KEYFILE -L 6006:localhost:6006")
    print(
        f"delete it: pcluster delete-cluster {name}; the file system stays, and costs until it is deleted too"
    )
    _print_prices(plan, "head node", plan.head_instance)
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
    _write(plan, out)
    print("make them, one after the other:")
    for file in (FILE_SYSTEM, CLUSTER):
        print(f"    {plan.create_stack(file, out / file)}")
    print(f"the data host: {plan.print_data_host()}")
    print("delete them, the cluster first; the second takes all runs with it, but not the bucket:")
    for file in (CLUSTER, FILE_SYSTEM):
        print(f"    {plan.delete_stack(file)}")
    _print_prices(plan, "data host", plan.data_instance)
    print(f"an hour of the cluster: {_price(*_hosts(plan))}")
    return EXIT_OK


def _write(plan: ParallelCluster | CloudFormation, out: Path) -> None:
    """Write the files and print their names."""
    known = allowed("ec2", "InstanceType") if find_spec("botocore") is not None else []
    for field in fields(plan):
        value = getattr(plan, field.name)
        if known and field.name.endswith("_instance") and value not in known:
            raise UsageError(
                f"{option(field.name)} {value!r} is no instance type that botocore knows; "
                f"upgrade boto3 if it is new.{did_you_mean(value, known)}"
            )
    out.mkdir(parents=True, exist_ok=True)
    for file, text in plan.files().items():
        (out / file).write_text(text, encoding="utf-8")
        print(out / file)


def _print_prices(plan: ParallelCluster | CloudFormation, host: str, instance: str) -> None:
    file_system = plan.fsx_gb * _FSX_PER_GB_MONTH / _HOURS_A_MONTH
    print(f"an hour of the file system: ${file_system:.2f}, a list price recalled and not confirmed")
    print(f"an hour of the {host}: {_price((instance, 1))}")


def _hosts(plan: ParallelCluster | CloudFormation) -> tuple[tuple[str, int], ...]:
    return (plan.worker_instance, plan.workers), (plan.helper_instance, plan.helpers)


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
