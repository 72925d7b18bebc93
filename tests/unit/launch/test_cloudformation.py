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
from shoal.launch.aws_cluster import CLUSTER, FILE_SYSTEM, CloudFormation

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


def templates() -> dict[str, dict[str, Any]]:
    """Return both templates, with functions in their long form."""
    decoded = {}
    for file, text in CloudFormation(**COMMON).files().items():
        decoded[file], wrong = decode.decode_str(text)
        assert not wrong
    return decoded


def resolved(value: Any, template: dict[str, Any], given: dict[str, str]) -> Any:
    """Return a value as CloudFormation would fill it in; exports of other stacks are their names."""

    def fill(inner: Any) -> Any:
        return resolved(inner, template, given)

    if isinstance(value, list):
        return [each for each in map(fill, value) if each != "AWS::NoValue"]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("Ref", name):
            filled = given.get(name, name)
            return int(filled) if filled.isdecimal() else filled
        case ("Fn::Sub", [text, more]):
            return resolved({"Fn::Sub": text}, template, given | {k: fill(v) for k, v in more.items()})
        case ("Fn::Sub", text):
            for name, each in given.items():
                text = text.replace(f"${{{name}}}", each)
            return text
        case ("Fn::ImportValue" | "Fn::Base64", inner):
            return fill(inner)
        case ("Fn::Join", [separator, parts]):
            return separator.join(map(fill, parts))
        case ("Fn::FindInMap", [name, row, column]):
            return template["Mappings"][name][str(fill(row))][column]
        case ("Fn::Equals", [one, other]):
            return fill(one) == fill(other)
        case ("Fn::If", [condition, one, other]):
            return fill(one if fill(template["Conditions"][condition]) else other)
        case ("Fn::GetAtt", _):
            return "attribute"
    filled = {key: fill(each) for key, each in value.items()}
    return {key: each for key, each in filled.items() if each != "AWS::NoValue"}


def wrong_values(template: dict[str, Any], given: dict[str, str]) -> list[str]:
    """Return the resources' mistakes by the services' models, which cfn-lint leaves to them."""
    found = []
    for name, resource in template["Resources"].items():
        filled = resolved(resource["Properties"], template, given)
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
    """Return the mistakes that cfn-lint finds in a template."""
    return [str(each) for each in api.lint(json.dumps(template), regions=["us-east-1"])]


@pytest.mark.parametrize("settings", [{}, {"helpers": 0, "spot": True, "worker_cards": 32, "fsx_gb": 4_800}])
def test_both_stacks_are_valid(settings: dict[str, Any]) -> None:
    parameters = CloudFormation(**COMMON, **settings).parameters
    for file, template in templates().items():
        if not settings:  # it takes seconds
            assert lint(template) == []
        assert set(parameters[file]) <= set(template["Parameters"])
        without = {name for name, each in template["Parameters"].items() if "Default" not in each}
        assert without <= set(parameters[file])
        assert wrong_values(template, GIVEN | parameters[file]) == []


def test_a_worker_has_as_many_cards_with_efa_as_it_is_given() -> None:
    template = templates()[CLUSTER]
    numbers = template["Parameters"]["WorkerCards"]["AllowedValues"]
    assert numbers == list(template["Mappings"]["Cards"]) == ["1", "2", "4", "8", "16", "17", "32"]
    worker = template["Resources"]["Worker"]["Properties"]
    for number in map(int, numbers):
        given = GIVEN | CloudFormation(**COMMON, worker_cards=number).parameters[CLUSTER]
        cards = resolved(worker, template, given)["LaunchTemplateData"]["NetworkInterfaces"]
        assert cards == [
            {
                "InterfaceType": "efa", "DeviceIndex": min(card, 1), "NetworkCardIndex": card,
                "DeleteOnTermination": True, "Groups": ["shoal-fs-Network"],
            }
            for card in range(number)
        ]  # fmt: skip


@pytest.mark.parametrize("spot", [False, True])
def test_workers_are_spot_instances_where_asked(spot: bool) -> None:
    template = templates()[CLUSTER]
    given = GIVEN | CloudFormation(**COMMON, spot=spot).parameters[CLUSTER]
    worker = resolved(template["Resources"]["Worker"]["Properties"], template, given)["LaunchTemplateData"]
    assert worker.get("InstanceMarketOptions") == ({"MarketType": "spot"} if spot else None)


def test_the_cluster_imports_the_exports_of_the_file_system() -> None:
    found = templates()
    given = GIVEN | CloudFormation(**COMMON).parameters[CLUSTER] | {"AWS::StackName": "shoal-fs"}
    exported = {
        resolved(each["Export"]["Name"], found[FILE_SYSTEM], given)
        for each in found[FILE_SYSTEM]["Outputs"].values()
        if "Export" in each
    }
    imported: set[str] = set()

    def visit(value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else ():
            if key == "Fn::ImportValue":
                imported.add(resolved(each, found[CLUSTER], given))
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
    parameters = CloudFormation(**COMMON).parameters
    given = GIVEN | parameters[CLUSTER] | parameters[FILE_SYSTEM]
    for file, path, value in MISTAKES:
        bad = copy.deepcopy(good[file])
        inner: Any = bad["Resources"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        # cfn-lint takes seconds: it is asked only where the models find nothing
        assert wrong_values(bad, given) or lint(bad), f"nobody finds {path[-1]}: {value}"


def test_scripts_that_the_hosts_run_when_they_start(tmp_path: Path) -> None:
    """Read the scripts with bash; run the data host's list of hosts with an aws that answers."""
    found = templates()
    hosts = {"Worker": CLUSTER, "Helper": CLUSTER, "DataHost": FILE_SYSTEM}
    given = GIVEN | CloudFormation(**COMMON).parameters[CLUSTER] | {"AWS::StackName": "shoal-fs"}
    given |= {"FileSystem.DNSName": "fs-1.fsx", "FileSystem.LustreMountName": "abcdefgh"}
    scripts = []
    for name, file in hosts.items():
        properties = found[file]["Resources"][name]["Properties"]
        data = properties.get("LaunchTemplateData", properties)["UserData"]
        scripts.append(resolved(data, found[file], given))
        subprocess.run(["bash", "-n"], input=scripts[-1], text=True, check=True)
    worker, helper, data_host = scripts
    assert worker == helper
    head, mount, *rest = worker.splitlines()
    assert (head, mount) == ("#!/bin/bash", "mount=shoal-fs-Mount")
    inline = [line.replace("$mount", "fs-1.fsx@tcp:/abcdefgh") for line in rest]
    assert data_host.splitlines()[: len(rest) + 1] == [
        head,
        *inline,
    ]  # the data host mounts it in the same way
    listing = data_host.partition("shoal-hosts <<'END'\n")[2].partition("\nEND\n")[0]
    (tmp_path / "aws").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > asked\nprintf "ip-2\\nip-1\\n"\n')
    (tmp_path / "aws").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", listing, "shoal-hosts", "helper"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "--helper-hosts ip-1\n--helper-hosts ip-2\n"
    assert "Name=tag:shoal:helper,Values=shoal-fs\n" in (tmp_path / "asked").read_text()
    (tag,) = found[CLUSTER]["Resources"]["HelperHosts"]["Properties"]["Tags"]
    assert (tag["Key"], resolved(tag["Value"], found[CLUSTER], given)) == ("shoal:helper", "shoal-fs")
    assert "--host 127.0.0.1 --port 6006" in data_host


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"region": "Virginia"}, "--region 'Virginia' is not of the form"),
    ({"vpc": "subnet-0123456789abcdef0"}, "--vpc 'subnet-0123456789abcdef0' is not"),
    ({"data_subnet": "subnet-1"}, "--data-subnet 'subnet-1' is not"),
    ({"bucket": "s3://b"}, "--bucket 's3://b' is not"),
    ({"ssh_from": "everywhere"}, "--ssh-from 'everywhere' is not"),
    ({"workers": 0}, "--workers 0 must be at least 1"),
    ({"worker_cards": 0}, "--worker-cards 0 must be one of 1, 2, 4, 8, 16, 17, 32"),
    ({"fsx_gb": 1_300}, "--fsx-gb 1300 must be 1200 or a multiple of 2400"),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_mistakes_in_the_options(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CloudFormation(**{**COMMON, **settings})


def test_the_command_prints_the_commands_that_make_and_delete_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = CloudFormation(**COMMON, name="mine")
    assert write(plan=plan, out=tmp_path / "aws") == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {path.name: path.read_text() for path in (tmp_path / "aws").iterdir()} == plan.files()
    made = [plan.create_stack(file, tmp_path / "aws" / file) for file in (FILE_SYSTEM, CLUSTER)]
    deleted = [plan.delete_stack(file) for file in (CLUSTER, FILE_SYSTEM)]
    assert [line for line in said if line in made + deleted] == made + deleted
    first, second = map(shlex.split, made)
    assert [words[words.index("--stack-name") + 1] for words in (first, second)] == ["mine-fs", "mine"]
    assert first[first.index("--capabilities") + 1] == "CAPABILITY_IAM" and "--capabilities" not in second
    for words in (first, second):
        assert "ParameterKey=KeyName,ParameterValue=key" in words
    # 8 × p4d.24xlarge at 21.957642 and 4 × c5n.18xlarge at 3.888; 1,200 GB at 0.21 a month
    costs = {"file system": "$0.35", "data host": "$0.38", "cluster": "$191.21"}
    for part, price in costs.items():
        assert [line for line in said if line.startswith(f"an hour of the {part}: {price}")]
    with pytest.raises(UsageError, match=r"--data-instance 'm5.2xlarg' is no instance type"):
        write(plan=CloudFormation(**COMMON, data_instance="m5.2xlarg"), out=tmp_path / "no")
