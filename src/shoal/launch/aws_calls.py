"""Calls AWS through boto3, and makes its errors one with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shoal.errors import ShoalError, import_extra

T = TypeVar("T")

_REMEDIES = {
    "ExpiredToken": "the credentials have expired: aws sso login, or new keys",
    "RequestExpired": "the credentials have expired, or this machine's clock is wrong: date",
    "InvalidClientTokenId": "the credentials are not known to AWS: aws configure",
    "UnrecognizedClient": "the credentials are not known to AWS: aws configure",
    "AccessDenied": "this user's policy does not allow it",
    "ResourceLimitExceeded": "ask for more under Service Quotas, Amazon SageMaker, 'for training job usage'",
    "ServiceQuotaExceeded": "ask for more under Service Quotas in AWS's console",
    "LimitExceeded": "ask for more under Service Quotas in AWS's console",
    "ResourceInUse": "a job of this name exists; submit again",
    "NoSuchBucket": "aws s3 mb makes the bucket of --bucket",
    "Throttling": "try again in a minute",
}


def client(service: str, region: str | None) -> Any:
    """Return a client of boto3.

    Raises:
        ShoalError: boto3 is not installed, or no region is known.
    """
    boto3 = import_extra("boto3", "aws", "AWS is asked through boto3")
    return called(lambda: boto3.session.Session(region_name=region).client(service))


def called(call: Callable[[], T]) -> T:
    """Call AWS and return the response.

    Raises:
        ShoalError: it fails; with AWS's message and, if one is known, a remedy.
    """
    errors = import_extra("botocore.exceptions", "aws", "AWS is asked through boto3")
    try:
        return call()
    except errors.ClientError as problem:
        code = problem.response.get("Error", {}).get("Code", "")
        remedy = next((text for sign, text in _REMEDIES.items() if code.startswith(sign)), "")
        raise ShoalError(f"AWS: {problem}{remedy and f' ({remedy})'}") from None
    except errors.BotoCoreError as problem:
        hint = " (aws configure, or --region)" if "egion" in str(problem) else ""
        hint = " (aws configure, or aws sso login)" if "redentials" in str(problem) else hint
        raise ShoalError(f"AWS: {problem}{hint}") from None
