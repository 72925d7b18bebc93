"""The two CloudFormation stacks: cfn-lint and the services' own models take them, and find mistakes."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.cluster import cloudformation as write
from shoal.errors import UsageError
from shoal.launch.aws_checks import allowed, problems
from shoal.launch.cloudformation import (
    CLUSTER,
    FILE_SYSTEM,
    CloudFormation,
    create_stack,
    delete_stack,
    parameters,
    render,
)

api = pytest.importorskip("cfnlint.api", reason="comes with moto[server]")
decode = pytest.importorskip("cfnlint.decode", reason="comes with moto[server]")
COMMON: dict[str, Any] = {
    "region": "us-east-1", "vpc": "vpc-0123456789abcdef0", "subnet": "subnet-0123456789abcdef0",
    "key": "key", "bucket": "my-data", "ssh_from": "203.0.113.7/32",
}  # fmt: skip
GIVEN = {"AWS::StackName": "shoal", "AWS::Region": "us-east-1", "Network": "sg-0123456789abcdef0"}
GIVEN |= {"FileSystem": "fs-0123456789abcdef0", "Near": "near", "Ssh": "sg-0123456789abcdef1"}
GIVEN |= {"Image": "ami-0123456789abcdef0", "Profile": "profile", "Role": "role"}
OPERATIONS = {
    "AWS::FSx::FileSystem": ("fsx", "CreateFileSystem"),
    "AWS::FSx::DataRepositoryAssociation": ("fsx", "CreateDataRepositoryAssociation"),
    "AWS::EC2::PlacementGroup": ("ec2", "CreatePlacementGroup"),
}


def templates(**settings: Any) -> dict[str, dict[str, Any]]:
    """Return both templates, with functions in their long form."""
    found = {}
    for file, text in render(CloudFormation(**COMMON, **settings)).items():
        found[file], wrong = decode.decode_str(text)
        assert not wrong
    return found


def resolved(value: Any, given: dict[str, str]) -> Any:
    """Return a value as CloudFormation would fill it in, with what other stacks export as it is named."""
    if isinstance(value, list):
        return [resolved(each, given) for each in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("Ref", name):
            filled = given.get(name, name)
            return int(filled) if filled.isdecimal() else filled
        case ("Fn::Sub", [text, more]):
            return resolved({"Fn::Sub": text}, given | {k: resolved(v, given) for k, v in more.items()})
        case ("Fn::Sub", text):
            for name, each in given.items():
                text = text.replace(f"${{{name}}}", each)
            return text
        case ("Fn::ImportValue" | "Fn::Base64", inner):
            return resolved(inner, given)
        case ("Fn::If", [_, inner, _]):
            return resolved(inner, given)
        case ("Fn::GetAtt", _):
            return "attribute"
    return {key: resolved(each, given) for key, each in value.items()}


def wrong_values(template: dict[str, Any], given: dict[str, str]) -> list[str]:
    """Return what the services' models have against the resources, which cfn-lint leaves to them."""
    found = []
    for name, resource in template["Resources"].items():
        filled = resolved(resource["Properties"], given)
        if data := filled.get("LaunchTemplateData"):
            request = {"LaunchTemplateName": name, "LaunchTemplateData": {**data, "UserData": "x"}}
            found += problems("ec2", "CreateLaunchTemplate", request)
            cards = data["NetworkInterfaces"]
            found += [
                f"{name}: {card}"
                for card in cards
                if card["InterfaceType"] not in ("efa", "efa-only", "interface")
            ]
        elif resource["Type"] in OPERATIONS:
            found += problems(*OPERATIONS[resource["Type"]], filled)
        elif resource["Type"] == "AWS::EC2::Instance" and filled["InstanceType"] not in allowed(
            "ec2", "InstanceType"
        ):
            found.append(f"{name}: {filled['InstanceType']}")
    return found


def lint(template: dict[str, Any]) -> list[str]:
    """Return what cfn-lint has against a template."""
    return [str(each) for each in api.lint(json.dumps(template), regions=["us-east-1"])]


@pytest.mark.parametrize("settings", [{}, {"helpers": 0, "spot": True, "worker_cards": 32, "fsx_gb": 4_800}])
def test_both_stacks_are_valid(settings: dict[str, Any]) -> None:
    plan = CloudFormation(**COMMON, **settings)
    for file, template in templates(**settings).items():
        if not settings:  # it takes seconds
            assert lint(template) == []
        assert set(parameters(plan)[file]) <= set(template["Parameters"])
        without = {name for name, each in template["Parameters"].items() if "Default" not in each}
        assert without <= set(parameters(plan)[file])
        assert wrong_values(template, GIVEN | parameters(plan)[file]) == []


def test_what_the_cluster_imports_is_what_the_file_system_exports() -> None:
    found = templates()
    given = GIVEN | parameters(CloudFormation(**COMMON))[CLUSTER] | {"AWS::StackName": "shoal-fs"}
    exported = {
        resolved(each["Export"]["Name"], given)
        for each in found[FILE_SYSTEM]["Outputs"].values()
        if "Export" in each
    }
    imported: set[str] = set()

    def visit(value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else ():
            if key == "Fn::ImportValue":
                imported.add(resolved(each, given))
            visit(each)
        for each in value if isinstance(value, list) else ():
            visit(each)

    visit(found[CLUSTER])
    assert imported == exported == {"shoal-fs-Mount", "shoal-fs-Network"}


LUSTRE = ("FileSystem", "Properties", "LustreConfiguration")
MISTAKES: list[tuple[str, tuple[str | int, ...], Any]] = [
    (FILE_SYSTEM, (*LUSTRE, "DeploymentType"), "PERSISTENT_9"),
    (FILE_SYSTEM, (*LUSTRE, "DataCompressionTyp"), "LZ4"),
    (FILE_SYSTEM, ("Data", "Properties", "S3", "AutoImportPolicy"), {"Events": ["RENAMED"]}),
    (FILE_SYSTEM, ("Network", "Properties", "VpcId"), {"Ref": "VPC"}),
    (CLUSTER, ("Near", "Properties", "Strategy"), "clustered"),
    (CLUSTER, ("Worker", "Properties", "LaunchTemplateData", "InstanceType"), "p99.huge"),
    (
        CLUSTER,
        ("Worker", "Properties", "LaunchTemplateData", "NetworkInterfaces", 0, "InterfaceType"),
        "efaa",
    ),
    (CLUSTER, ("WorkerHosts", "Properties", "MinSiz"), "1"),
    (FILE_SYSTEM, ("DataHost", "Properties", "InstanceType"), "m5.2xlarg"),
]


def test_each_planted_mistake_is_found() -> None:
    good = templates()
    given = (
        GIVEN
        | parameters(CloudFormation(**COMMON))[CLUSTER]
        | parameters(CloudFormation(**COMMON))[FILE_SYSTEM]
    )
    for file, path, value in MISTAKES:
        bad = copy.deepcopy(good[file])
        inner: Any = bad["Resources"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        # cfn-lint takes seconds: it is asked for what the models do not see
        assert wrong_values(bad, given) or lint(bad), f"nothing is said of {path[-1]}: {value}"


def test_what_the_hosts_run_when_they_start(tmp_path: Path) -> None:
    """Read the scripts with bash; run the data host's list of hosts with an aws that answers."""
    found = templates()
    hosts = {"Worker": CLUSTER, "Helper": CLUSTER, "DataHost": FILE_SYSTEM}
    holders = [found[file]["Resources"][name]["Properties"] for name, file in hosts.items()]
    given = GIVEN | parameters(CloudFormation(**COMMON))[CLUSTER] | {"AWS::StackName": "shoal-fs"}
    given |= {"FileSystem.DNSName": "fs-1.fsx", "FileSystem.LustreMountName": "abcdefgh"}
    scripts = [resolved(each.get("LaunchTemplateData", each)["UserData"], given) for each in holders]
    mounts = ["shoal-fs-Mount", "shoal-fs-Mount", "fs-1.fsx@tcp:/abcdefgh"]
    for script, mount in zip(scripts, mounts, strict=True):
        assert script.startswith("#!/bin/bash\n") and f'"{mount} /fsx lustre' in script
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    listing = scripts[2].partition("shoal-hosts <<'END'\n")[2].partition("\nEND\n")[0]
    (tmp_path / "aws").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > asked\nprintf "ip-2\\nip-1\\n"\n')
    (tmp_path / "aws").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", listing, "shoal-hosts", "helper"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "--helper-hosts ip-1\n--helper-hosts ip-2\n"
    assert "Name=tag:shoal:helper,Values=shoal-fs\n" in (tmp_path / "asked").read_text()
    (tag,) = found[CLUSTER]["Resources"]["HelperHosts"]["Properties"]["Tags"]
    assert (tag["Key"], resolved(tag["Value"], given)) == ("shoal:helper", "shoal-fs")
    assert "--host 127.0.0.1 --port 6006" in scripts[2]


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"region": "Virginia"}, "--region 'Virginia' is not of the form"),
    ({"vpc": "subnet-0123456789abcdef0"}, "--vpc 'subnet-0123456789abcdef0' is not"),
    ({"data_subnet": "subnet-1"}, "--data-subnet 'subnet-1' is not"),
    ({"bucket": "s3://b"}, "--bucket 's3://b' is not"),
    ({"ssh_from": "everywhere"}, "--ssh-from 'everywhere' is not"),
    ({"workers": 0}, "--workers 0 must be at least 1"),
    ({"worker_cards": 0}, "--worker-cards 0 must be from 1 to 32"),
    ({"fsx_gb": 1_300}, "--fsx-gb 1300 must be 1200 or a multiple of 2400"),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_mistakes_in_the_options(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CloudFormation(**{**COMMON, **settings})


def test_the_command_says_how_to_make_and_delete_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = CloudFormation(**COMMON, name="mine")
    assert write(plan=plan, out=tmp_path / "aws") == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {path.name: path.read_text() for path in (tmp_path / "aws").iterdir()} == render(plan)
    made = [create_stack(plan, file, str(tmp_path / "aws" / file)) for file in (FILE_SYSTEM, CLUSTER)]
    deleted = [delete_stack(plan, file) for file in (CLUSTER, FILE_SYSTEM)]
    assert [line for line in said if line in made + deleted] == made + deleted
    first, second = map(shlex.split, made)
    assert [words[words.index("--stack-name") + 1] for words in (first, second)] == ["mine-fs", "mine"]
    assert first[first.index("--capabilities") + 1] == "CAPABILITY_IAM" and "--capabilities" not in second
    for words in (first, second):
        assert "ParameterKey=KeyName,ParameterValue=key" in words
    # 8 × p4d.24xlarge at 32.77 and 4 × c5n.18xlarge at 3.888; 1,200 GB at 0.21 a month
    costs = {"file system": "$0.35", "data host": "$0.38", "cluster": "$277.71"}
    for what, price in costs.items():
        assert [line for line in said if line.startswith(f"an hour of the {what}: {price}")]
    with pytest.raises(UsageError, match=r"--data-instance 'm5.2xlarg' is no instance type"):
        write(plan=CloudFormation(**COMMON, data_instance="m5.2xlarg"), out=tmp_path / "no")
