"""Checks requests to AWS by the rules in botocore's models, without a call.

botocore itself checks names and types only. The service would refuse wrong values of enumerations, patterns
and limits after the image has been pushed and the data uploaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from shoal.errors import did_you_mean, import_extra


def problems(service: str, operation: str, request: Mapping[str, Any]) -> list[str]:
    """Return a request's violations of the model of its operation.

    Raises:
        ShoalError: botocore is not installed.
    """
    shape = _model(service).operation_model(operation).input_shape
    validate = import_extra("botocore.validate", "aws", "requests to AWS are checked with boto3")
    report = validate.ParamValidator().validate(request, shape)
    if report.has_errors():
        return [str(line) for line in report.generate_report().splitlines()]
    return _limits(shape, request, "")


def allowed(service: str, shape: str) -> list[str]:
    """Return the values of an enumeration of a service, such as ``TrainingInstanceType``."""
    return list(_model(service).shape_for(shape).enum)


@cache
def _model(service: str) -> Any:
    session = import_extra("botocore.session", "aws", "requests to AWS are checked with boto3")
    return session.get_session().get_service_model(service)


def _limits(shape: Any, value: Any, path: str) -> list[str]:
    """Check sizes, enumerations and patterns."""
    violations = []
    limits = shape.metadata
    size = value if shape.type_name in ("integer", "long", "float") else _size(value)
    if size is not None and not limits.get("min", size) <= size <= limits.get("max", size):
        unit = "" if size is value else " long"
        rule = f"{limits.get('min', 0)} to {limits.get('max', 'any')}"
        violations.append(f"{path} is {size}{unit} and must be {rule}")
    if shape.type_name == "string":
        choices = getattr(shape, "enum", None)
        if choices and value not in choices:
            few = f" Known are {', '.join(choices)}." if len(choices) <= 6 else ""
            violations.append(f"{path} {value!r} is not known.{did_you_mean(value, choices)}{few}")
        pattern = limits.get("pattern")
        if pattern and "\\p{" not in pattern and not re.fullmatch(pattern, value):
            violations.append(f"{path} {value!r} does not match {pattern}")
    elif shape.type_name == "list":
        for number, each in enumerate(value):
            violations += _limits(shape.member, each, f"{path}[{number}]")
    elif shape.type_name == "map":
        for key, each in value.items():
            violations += _limits(shape.key, key, f"{path}: the name") + _limits(
                shape.value, each, f"{path}.{key}"
            )
    elif shape.type_name == "structure":
        for name, each in value.items():
            violations += _limits(shape.members[name], each, f"{path}.{name}".lstrip("."))
    return violations


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, str | list | tuple | dict) else None
