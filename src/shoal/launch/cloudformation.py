"""Writes two CloudFormation stacks: a file system over an S3 bucket with a data host, then a cluster.

Data is prepared on the data host before the cluster costs anything. The cluster has no scheduler: the data
host finds the others by their tags, and ``shoal submit ssh`` starts jobs there; the secret of each start goes
through ssh, so that none is kept in AWS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.launch.aws_cluster import AwsCluster

FILE_SYSTEM, CLUSTER = "filesystem.yaml", "cluster.yaml"
_MAX_CARDS = 32


@dataclass(frozen=True, kw_only=True)
class CloudFormation(AwsCluster):
    """Two stacks to be made, called NAME-fs and NAME; their hosts run until the second is deleted."""

    vpc: str
    """VPC of all hosts."""
    data_subnet: str | None = None
    """Subnet of the data host, which you reach by ssh: a public one in the same zone; default: --subnet."""
    ssh_from: str
    """Addresses that may reach the data host by ssh, like 203.0.113.7/32."""
    worker_cards: int = 4
    """Network cards with EFA of a worker host: 4 of p4d.24xlarge, 32 of p5.48xlarge, 1 of p3dn.24xlarge."""
    data_instance: str = "m5.2xlarge"
    """Type of the data host, which prepares data and runs TensorBoard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.worker_cards <= _MAX_CARDS:
            raise UsageError(f"--worker-cards {self.worker_cards} must be from 1 to {_MAX_CARDS}")


def render(plan: CloudFormation) -> dict[str, str]:
    """Return the templates of both stacks as YAML, by the names of their files."""
    cards = "".join(_CARD % {"device": min(number, 1), "card": number} for number in range(plan.worker_cards))
    helper_card = _CARD % {"device": 0, "card": 0}
    cluster = _CLUSTER % {"cards": cards, "helper_card": helper_card, "mount": _MOUNT}
    return {FILE_SYSTEM: _FILE_SYSTEM % {"mount": _MOUNT}, CLUSTER: cluster}


def parameters(plan: CloudFormation) -> dict[str, dict[str, str]]:
    """Return the parameters of both stacks, by the names of the templates' files."""
    return {
        FILE_SYSTEM: {
            "Bucket": plan.bucket,
            "Vpc": plan.vpc,
            "Subnet": plan.subnet,
            "SizeGb": str(plan.fsx_gb),
            "DataSubnet": plan.data_subnet or plan.subnet,
            "DataType": plan.data_instance,
            "KeyName": plan.key,
            "SshFrom": plan.ssh_from,
        },
        CLUSTER: {
            "FileSystemStack": f"{plan.name}-fs",
            "Subnet": plan.subnet,
            "KeyName": plan.key,
            "Workers": str(plan.workers),
            "WorkerType": plan.worker_instance,
            "Helpers": str(plan.helpers),
            "HelperType": plan.helper_instance,
            "Spot": str(plan.spot).lower(),
        },
    }


def create_stack(plan: CloudFormation, file: str, path: str) -> str:
    """Return the command that makes the stack of a template and waits for it."""
    name = stack_names(plan)[file]
    given = " ".join(
        f"ParameterKey={key},ParameterValue={value}" for key, value in parameters(plan)[file].items()
    )
    role = " --capabilities CAPABILITY_IAM" if file == FILE_SYSTEM else ""
    return (
        f"aws cloudformation create-stack --region {plan.region} --stack-name {name}{role} "
        f"--template-body file://{path} --parameters {given} && "
        f"aws cloudformation wait stack-create-complete --region {plan.region} --stack-name {name}"
    )


def delete_stack(plan: CloudFormation, file: str) -> str:
    """Return the command that deletes a stack."""
    return f"aws cloudformation delete-stack --region {plan.region} --stack-name {stack_names(plan)[file]}"


def ask_data_host(plan: CloudFormation) -> str:
    """Return the command that prints the data host's name."""
    return (
        f"aws cloudformation describe-stacks --region {plan.region} --stack-name {plan.name}-fs "
        "--output text --query 'Stacks[0].Outputs[?OutputKey==`DataHost`].OutputValue'"
    )


def stack_names(plan: CloudFormation) -> Mapping[str, str]:
    """Return the names of the stacks, by the names of the templates' files."""
    return {FILE_SYSTEM: f"{plan.name}-fs", CLUSTER: plan.name}


_FILE_SYSTEM = """\
AWSTemplateFormatVersion: "2010-09-09"
Description: shoal - FSx for Lustre over an S3 bucket, and a data host; make it before the cluster
Parameters:
  Bucket: {Type: String}
  Vpc: {Type: "AWS::EC2::VPC::Id"}
  Subnet: {Type: "AWS::EC2::Subnet::Id"}
  SizeGb: {Type: Number, Default: 1200}
  DataSubnet: {Type: "AWS::EC2::Subnet::Id"}
  DataType: {Type: String, Default: m5.2xlarge}
  KeyName: {Type: "AWS::EC2::KeyPair::KeyName"}
  SshFrom: {Type: String}
  Image:
    Type: AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>
    Default: /aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id
Resources:
  Network:  # hosts and file system; all traffic between its members, which EFA needs both ways
    Type: AWS::EC2::SecurityGroup
    Properties:
      GroupDescription: shoal hosts and their file system
      VpcId: !Ref Vpc
      SecurityGroupEgress: [{IpProtocol: "-1", CidrIp: 0.0.0.0/0}]
  NetworkIn:
    Type: AWS::EC2::SecurityGroupIngress
    Properties: {GroupId: !Ref Network, IpProtocol: "-1", SourceSecurityGroupId: !Ref Network}
  NetworkOut:
    Type: AWS::EC2::SecurityGroupEgress
    Properties: {GroupId: !Ref Network, IpProtocol: "-1", DestinationSecurityGroupId: !Ref Network}
  FileSystem:
    Type: AWS::FSx::FileSystem
    DeletionPolicy: Delete  # with all runs; CloudFormation refuses while a cluster mounts it
    UpdateReplacePolicy: Retain
    Properties:
      FileSystemType: LUSTRE
      FileSystemTypeVersion: "2.15"
      StorageCapacity: !Ref SizeGb
      SubnetIds: [!Ref Subnet]
      SecurityGroupIds: [!Ref Network]
      LustreConfiguration:
        DeploymentType: PERSISTENT_2
        PerUnitStorageThroughput: 250
        DataCompressionType: LZ4
  Data:
    Type: AWS::FSx::DataRepositoryAssociation
    Properties:
      FileSystemId: !Ref FileSystem
      FileSystemPath: /data
      DataRepositoryPath: !Sub "s3://${Bucket}"
      BatchImportMetaDataOnCreate: true
      S3:
        AutoImportPolicy: {Events: [NEW, CHANGED, DELETED]}
        AutoExportPolicy: {Events: [NEW, CHANGED]}  # rm on /fsx/data leaves the bucket as it is
  Ssh:
    Type: AWS::EC2::SecurityGroup
    Properties:
      GroupDescription: ssh to the data host
      VpcId: !Ref Vpc
      SecurityGroupIngress: [{IpProtocol: tcp, FromPort: 22, ToPort: 22, CidrIp: !Ref SshFrom}]
  Role:  # of the data host, which asks for the names of the others; EC2 knows no narrower resource here
    Type: AWS::IAM::Role
    Properties:
      AssumeRolePolicyDocument:
        Version: "2012-10-17"
        Statement: [{Effect: Allow, Principal: {Service: ec2.amazonaws.com}, Action: "sts:AssumeRole"}]
      Policies:
      - PolicyName: names
        PolicyDocument:
          Version: "2012-10-17"
          Statement: [{Effect: Allow, Action: "ec2:DescribeInstances", Resource: "*"}]
  Profile: {Type: "AWS::IAM::InstanceProfile", Properties: {Roles: [!Ref Role]}}
  DataHost:
    Type: AWS::EC2::Instance
    Properties:
      ImageId: !Ref Image
      InstanceType: !Ref DataType
      KeyName: !Ref KeyName
      IamInstanceProfile: !Ref Profile
      SubnetId: !Ref DataSubnet
      SecurityGroupIds: [!Ref Ssh, !Ref Network]
      BlockDeviceMappings: [{DeviceName: /dev/sda1, Ebs: {VolumeSize: 100, VolumeType: gp3, Encrypted: true}}]
      Tags: [{Key: Name, Value: !Sub "${AWS::StackName}-data"}]
      UserData:
        Fn::Base64: !Sub
        - |
%(mount)s            chown ubuntu /fsx
            cat > /usr/local/bin/shoal-hosts <<'END'
            #!/bin/sh
            # shoal-hosts worker, shoal-hosts helper: options of shoal submit ssh for the hosts that run
            [ "$1" = helper ] && option=--helper-hosts || option=--hosts
            aws ec2 describe-instances --region ${AWS::Region} --output text \\
                --filters "Name=tag:shoal:$1,Values=${AWS::StackName}" \\
                Name=instance-state-name,Values=running \\
                --query 'Reservations[].Instances[].[PrivateDnsName]' | sort | sed "s/^/$option /"
            END
            chmod 755 /usr/local/bin/shoal-hosts
            printf 'Host ip-*\\n    StrictHostKeyChecking accept-new\\n' > /etc/ssh/ssh_config.d/shoal.conf
            cat > /etc/systemd/system/tensorboard.service <<'END'
            [Unit]
            RequiresMountsFor=/fsx
            [Service]
            User=ubuntu
            ExecStart=/fsx/venv/bin/tensorboard --host 127.0.0.1 --port 6006 --logdir /fsx/runs
            Restart=always
            RestartSec=30
            [Install]
            WantedBy=multi-user.target
            END
            systemctl enable --now tensorboard
        - Mount: !Sub "${FileSystem.DNSName}@tcp:/${FileSystem.LustreMountName}"
Outputs:
  DataHost: {Value: !GetAtt DataHost.PublicDnsName, Description: "ssh -A -L 6006:localhost:6006 ubuntu@..."}
  FileSystem: {Value: !Ref FileSystem}
  Mount:
    Value: !Sub "${FileSystem.DNSName}@tcp:/${FileSystem.LustreMountName}"
    Export: {Name: !Sub "${AWS::StackName}-Mount"}
  Network:
    Value: !Ref Network
    Export: {Name: !Sub "${AWS::StackName}-Network"}
"""

# Ubuntu: the wheel needs glibc 2.35 and Python 3.11, and Amazon Linux 2023 has 2.34 and 3.9
_CLUSTER = """\
AWSTemplateFormatVersion: "2010-09-09"
Description: shoal - worker and helper hosts with EFA, which mount the file system of the first stack
Parameters:
  FileSystemStack: {Type: String}
  Subnet: {Type: "AWS::EC2::Subnet::Id"}
  KeyName: {Type: "AWS::EC2::KeyPair::KeyName"}
  Workers: {Type: Number, Default: 8, MinValue: 1}
  WorkerType: {Type: String, Default: p4d.24xlarge}
  Helpers: {Type: Number, Default: 4, MinValue: 0}
  HelperType: {Type: String, Default: c5n.18xlarge}
  Spot: {Type: String, Default: "false", AllowedValues: ["true", "false"]}
  Image:
    Type: AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>
    Default: /aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id
Conditions: {UseSpot: !Equals [!Ref Spot, "true"]}
Resources:
  Near: {Type: "AWS::EC2::PlacementGroup", Properties: {Strategy: cluster}}
  Worker:
    Type: AWS::EC2::LaunchTemplate
    Properties:
      LaunchTemplateData:
        ImageId: !Ref Image
        InstanceType: !Ref WorkerType
        InstanceMarketOptions: !If [UseSpot, {MarketType: spot}, !Ref "AWS::NoValue"]
        KeyName: !Ref KeyName
        Placement: {GroupName: !Ref Near}
        MetadataOptions: {HttpTokens: required}
        NetworkInterfaces:
%(cards)s        UserData:
          Fn::Base64: !Sub
          - |
%(mount)s          - Mount: {"Fn::ImportValue": !Sub "${FileSystemStack}-Mount"}
  Helper:
    Type: AWS::EC2::LaunchTemplate
    Properties:
      LaunchTemplateData:
        ImageId: !Ref Image
        InstanceType: !Ref HelperType
        KeyName: !Ref KeyName
        Placement: {GroupName: !Ref Near}
        MetadataOptions: {HttpTokens: required}
        NetworkInterfaces:
%(helper_card)s        UserData:
          Fn::Base64: !Sub
          - |
%(mount)s          - Mount: {"Fn::ImportValue": !Sub "${FileSystemStack}-Mount"}
  WorkerHosts:
    Type: AWS::AutoScaling::AutoScalingGroup
    Properties:
      MinSize: "0"
      MaxSize: !Ref Workers
      DesiredCapacity: !Ref Workers
      VPCZoneIdentifier: [!Ref Subnet]
      LaunchTemplate: {LaunchTemplateId: !Ref Worker, Version: !GetAtt Worker.LatestVersionNumber}
      Tags: [{Key: "shoal:worker", Value: !Ref FileSystemStack, PropagateAtLaunch: true}]
  HelperHosts:
    Type: AWS::AutoScaling::AutoScalingGroup
    Properties:
      MinSize: "0"
      MaxSize: !Ref Helpers
      DesiredCapacity: !Ref Helpers
      VPCZoneIdentifier: [!Ref Subnet]
      LaunchTemplate: {LaunchTemplateId: !Ref Helper, Version: !GetAtt Helper.LatestVersionNumber}
      Tags: [{Key: "shoal:helper", Value: !Ref FileSystemStack, PropagateAtLaunch: true}]
"""

_CARD = """\
        - {InterfaceType: efa, DeviceIndex: %(device)s, NetworkCardIndex: %(card)s, DeleteOnTermination: true,
           Groups: [{"Fn::ImportValue": !Sub "${FileSystemStack}-Network"}]}
"""

_MOUNT = """\
            #!/bin/bash
            fsx=https://fsx-lustre-client-repo key=/usr/share/keyrings/fsx.gpg
            curl -fsS $fsx-public-keys.s3.amazonaws.com/fsx-ubuntu-public-key.asc | gpg --dearmor > $key
            echo "deb [signed-by=$key] $fsx.s3.amazonaws.com/ubuntu noble main" \\
                > /etc/apt/sources.list.d/fsx.list
            apt-get update && apt-get install -y python3-venv lustre-client-modules-$(uname -r)
            mkdir -p /fsx && echo "${Mount} /fsx lustre defaults,relatime,flock,_netdev 0 0" >> /etc/fstab
            mount /fsx
"""
