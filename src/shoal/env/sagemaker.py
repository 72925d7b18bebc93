"""Reads the variables of SageMaker's training jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.env.variables import Environ, text

SECRET_ID = "SHOAL_SECRET_ID"
"""Name or ARN of the job's secret in AWS Secrets Manager, for jobs of SageMaker."""
SOURCE_SHA256 = "SHOAL_SOURCE_SHA256"
"""Sum of the archive that ``shoal submit sagemaker --source`` has uploaded."""
SAGEMAKER_BASE = "SHOAL_SAGEMAKER_BASE"
"""Folder that stands for ``/opt/ml``; tests emulate SageMaker's instances with it."""


@dataclass(frozen=True, kw_only=True)
class SageMakerDefaults:
    """The environment variables that AWS's own examples read for a training job."""

    role: str | None
    fsx: str | None
    subnets: tuple[str, ...]


def sagemaker_defaults(environ: Environ = None) -> SageMakerDefaults:
    """Return SAGEMAKER_ROLE, SAGEMAKER_FSX_ID and SAGEMAKER_SUBNET_IDS (separated by commas)."""
    subnets = (text("SAGEMAKER_SUBNET_IDS", environ) or "").split(",")
    return SageMakerDefaults(
        role=text("SAGEMAKER_ROLE", environ),
        fsx=text("SAGEMAKER_FSX_ID", environ),
        subnets=tuple(subnet.strip() for subnet in subnets if subnet.strip()),
    )


def sagemaker_base(environ: Environ = None) -> Path:
    """Return the folder by which SageMaker and its containers exchange files."""
    return Path(text(SAGEMAKER_BASE, environ) or "/opt/ml")


def secret_id(environ: Environ = None) -> str | None:
    """Return the name of the job's secret in Secrets Manager, or ``None``."""
    return text(SECRET_ID, environ)


def source_sha256(environ: Environ = None) -> str | None:
    """Return the sum of the archive with the user's program, or ``None``."""
    return text(SOURCE_SHA256, environ)
