"""Building and pushing images: the commands, the login at ECR, the digest, what the tools refuse."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws

from shoal import __version__
from shoal.cli import image as command
from shoal.errors import ShoalError, UsageError
from shoal.launch import image as images
from shoal.launch.image import Image, build_command, find_tool, push_command

ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com/team/shoal"
DIGEST = f"sha256:{'0f' * 32}"
# Each writes down its words and what it is given; `push` writes the digest as podman and buildah do
TOOL = f"""#!/bin/sh
echo "$(basename "$0")" "$@" >> "$(dirname "$0")/said"
case $1 in
    login) cat > "$(dirname "$0")/password" ;;
    push) [ "$2" != --digestfile ] || printf {DIGEST} > "$3" ;;
    image) printf 'other/shoal@sha256:1\n{ECR}@{DIGEST}\n' ;;
esac
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs with the names of the three tools alone into the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in images.TOOLS:
        tool(folder, name, TOOL)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with what a checkout needs."""
    for path in ("repo/docker/Dockerfile", "repo/dist/shoal-1-cp311-cp311-linux_x86_64.whl"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    return tmp_path / "repo"


def said(folder: Path) -> list[str]:
    return [line for line in (folder / "said").read_text().splitlines() if "version" not in line]


def test_the_commands(checkout: Path, tmp_path: Path) -> None:
    helper = Image(repository=ECR, target="helper")
    built = build_command(
        helper, "podman", "1.2+g3", checkout, base="python:3.12", arguments=("PIP_OPTIONS=-q",)
    )
    assert built == [
        "podman", "build", "--file", f"{checkout}/docker/Dockerfile", "--target", "helper", "--tag",
        f"{ECR}:helper-1.2-g3", "--build-arg", "HELPER_BASE=python:3.12", "--build-arg", "PIP_OPTIONS=-q",
        str(checkout),
    ]  # fmt: skip
    worker = Image(repository=ECR, tag="mine")
    built = build_command(worker, "docker", "1.2", checkout, base="b", arguments=("EFA=1.43.2",))
    assert built[-5:-1] == ["--build-arg", "BASE=b", "--build-arg", "EFA=1.43.2"] and f"{ECR}:mine" in built
    assert push_command(worker, "docker", "1.2", tmp_path) == ["docker", "push", f"{ECR}:mine"]
    written = ["push", "--digestfile", str(tmp_path), f"{ECR}:mine"]
    assert push_command(worker, "podman", "1.2", tmp_path) == ["podman", *written]
    assert push_command(worker, "buildah", "1.2", tmp_path) == ["buildah", *written, f"docker://{ECR}:mine"]


@pytest.mark.parametrize("name", images.TOOLS)
def test_an_image_is_built_pushed_and_named_by_its_digest(
    tools: Path, checkout: Path, name: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    image = Image(repository=ECR, tool=name)
    with mock_aws():
        assert command.build(image=image, folder=checkout) == 0
        assert command.push(image=image) == 0
        token = base64.b64decode(
            images.client("ecr", "us-east-1").get_authorization_token(registryIds=["123456789012"])[
                "authorizationData"
            ][0]["authorizationToken"]
        ).decode()
    login = f"login --username AWS --password-stdin {ECR.partition('/')[0]}"
    lines = said(tools)
    assert lines[0].startswith(f"{name} build --file") and lines[1] == f"{name} {login}"
    assert lines[2].startswith(f"{name} push ")
    password = (tools / "password").read_text()
    assert token == f"AWS:{password}" and password not in capfd.readouterr().out + "".join(lines)


def test_a_dry_run_prints_and_does_nothing(
    tools: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = Image(repository=ECR, tool="buildah")
    command.build(image=image, folder=checkout, dry_run=True)
    command.push(image=image, dry_run=True)
    printed = capsys.readouterr().out.splitlines()
    tag = f"{ECR}:{__version__.replace('+', '-')}"
    assert printed[0] == (
        f"buildah build --file {checkout}/docker/Dockerfile --target worker --tag {tag} {checkout}"
    )
    assert printed[1:] == [
        "aws ecr get-login-password --region us-east-1 | buildah login --username AWS --password-stdin "
        + ECR.partition("/")[0],
        f"buildah push --digestfile digest {tag} docker://{tag}",
    ]
    assert not said(tools)


def test_the_digest_is_printed_and_another_registry_needs_no_login(
    tools: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.push(image=Image(repository="registry.example:5000/shoal", tag="1", tool="podman")) == 0
    out = capfd.readouterr().out
    assert f"\nregistry.example:5000/shoal@{DIGEST}\n" in out and "login" not in out
    assert not any("login" in line for line in said(tools))


def test_the_first_tool_that_works_is_used(tools: Path) -> None:
    assert find_tool() == "docker"
    tool(tools, "docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")
    assert find_tool() == "podman"
    with pytest.raises(UsageError, match="docker: Cannot connect to the Docker daemon"):
        find_tool("docker")


def test_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"docker was not found; podman .*apt-get install buildah"):
        find_tool()


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"repository": "shoal"}, "--repository 'shoal' is not of the form REGISTRY/NAME"),
    ({"repository": f"{ECR}:1"}, "is not of the form .* --tag names the tag"),
    ({"repository": "registry.example/Shoal"}, "in small letters"),
    ({"repository": "-x/shoal"}, "--repository '-x/shoal' is not"),
    ({"tag": "a b"}, "--tag 'a b' must be 1 to 128 letters"),
    ({"tag": "1+2"}, r"--tag '1\+2' must be"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_mistakes_in_the_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Image(**{"repository": ECR, **settings})


def test_a_folder_that_is_no_checkout(checkout: Path, tmp_path: Path) -> None:
    def built(folder: Path, *arguments: str) -> None:
        build_command(Image(repository=ECR), "docker", "1", folder, base=None, arguments=arguments)

    with pytest.raises(UsageError, match=r"docker/Dockerfile is missing: --folder names the root"):
        built(tmp_path)
    with pytest.raises(UsageError, match=r"--build-arg 'EFA' is not of the form NAME=VALUE"):
        built(checkout, "EFA")
    next((checkout / "dist").iterdir()).unlink()
    with pytest.raises(UsageError, match=r"dist has no wheel, which the image takes: make wheels"):
        built(checkout)


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        (
            "name unknown: The repository with name 'team/shoal' does not exist in the registry with id '1'",
            "aws ecr create-repository --repository-name team/shoal makes it",
        ),
        ("no basic auth credentials", "docker login 123456789012.dkr.ecr.us-east-1.amazonaws.com"),
        ("requested access to the resource is denied", "this account may not push to team/shoal"),
        ("write /x: no space left on device", "docker image prune"),
    ],
)
def test_what_the_registry_refuses_is_passed_on_with_a_remedy(
    tools: Path, complaint: str, remedy: str
) -> None:
    tool(tools, "docker", f'#!/bin/sh\necho "{complaint}" >&2; exit 1\n')
    with pytest.raises(ShoalError) as raised:
        images.push(Image(repository=ECR), "docker", "1")
    assert complaint in str(raised.value) and remedy in str(raised.value)


def test_a_tool_that_does_not_say_the_digest(tools: Path) -> None:
    tool(tools, "podman", "#!/bin/sh\nexit 0\n")
    tool(tools, "docker", "#!/bin/sh\nexit 0\n")
    with pytest.raises(ShoalError, match=r"docker has pushed .* does not say its digest"):
        images.push(Image(repository=ECR), "docker", "1")
