"""Defines ``shoal image``: builds the container images of ``docker/Dockerfile`` and pushes them."""

# Annotations are objects here, not texts: cyclopts reads those of the settings.

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from
from shoal.errors import EXIT_OK
from shoal.launch import image as images
from shoal.launch.image import Image

image = App(name="image", config=(settings_from(lambda _: ""),))


@image.command
def build(
    *,
    image: Annotated[Image, Parameter(name="*")],
    folder: Path = Path(),
    base: str | None = None,
    build_arg: tuple[str, ...] = (),
    dry_run: bool = False,
    config: Path | None = None,
) -> int:
    """Build an image from a checkout: `shoal image build --repository 1234….amazonaws.com/shoal`.

    Parameters
    ----------
    folder
        Root of shoal's repository, whose dist has the wheel of `make wheels`.
    base
        Image to build on, with Python and for workers torch; default: that of the Dockerfile.
    build_arg
        The Dockerfile's arguments, such as EFA=1.43.2 for libfabric with EFA.
    dry_run
        Print the command; build nothing.
    config
        TOML file with options of this command, such as repository = "….amazonaws.com/shoal".
    """
    tool, version = images.find_tool(image.tool), _version()
    command = images.build_command(image, tool, version, folder, base=base, arguments=build_arg)
    print(shlex.join(command), flush=True)
    if not dry_run:
        images.build(image, tool, command)
    return EXIT_OK


@image.command
def push(
    *,
    image: Annotated[Image, Parameter(name="*")],
    dry_run: bool = False,
    config: Path | None = None,
) -> int:
    """Push an image that was built, and print its name by digest: `shoal image push --repository …`.

    For Amazon's ECR it logs in first, with the credentials of the AWS configuration. For another registry,
    log in before.

    Parameters
    ----------
    dry_run
        Print the commands; push nothing.
    config
        TOML file with options of this command, such as repository = "….amazonaws.com/shoal".
    """
    tool, version = images.find_tool(image.tool), _version()
    if image.region is not None:
        ask = f"aws ecr get-login-password --region {image.region}"
        print(f"{ask} | {shlex.join(images.login_command(image, tool))}", flush=True)
        if not dry_run:
            images.log_in(image, tool)
    print(shlex.join(images.push_command(image, tool, version, Path("digest"))), flush=True)
    if not dry_run:
        name = images.push(image, tool, version)
        print(f"{name}\nstart jobs with it: shoal submit kubernetes --image {name} …")
    return EXIT_OK


def _version() -> str:
    from shoal import __version__

    return __version__
