"""Defines ``shoal cluster write``: files from which AWS's own tools make a cluster."""

# Annotations are objects here, not texts: cyclopts reads those of the settings.

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from
from shoal.errors import EXIT_OK
from shoal.launch import parallelcluster as parallel
from shoal.launch.parallelcluster import ParallelCluster

cluster = App(name="cluster")
write = App(name="write", help="Write files; nothing is made.", config=(settings_from(lambda _: ""),))
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
    price = _price(plan)
    print(f"an hour with all hosts: {price}; worker and helper hosts run only while jobs want them")
    return EXIT_OK


def _price(cluster: ParallelCluster) -> str:
    """Return the price of the worker and helper hosts by the planner's catalog."""
    from shoal.planner.hardware import Catalog

    known, total, unpriced = Catalog().instances, 0.0, []
    for name, count in (
        (cluster.worker_instance, cluster.workers),
        (cluster.helper_instance, cluster.helpers),
    ):
        price = known[name].price_per_hour if name in known else None
        total += count * (price or 0.0)
        if count and price is None:
            unpriced.append(name)
    without = f", without {', '.join(unpriced)}" if unpriced else ""
    return f"${total:,.0f} on demand by shoal plan's catalog{without}"
