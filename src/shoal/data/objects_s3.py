"""Objects in S3, and in stores that speak its protocol, by boto3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.data.objects import CONNECT_S, NUM_CONNECTIONS, READ_S, Check, Objects, Transient, Version
from shoal.errors import ShoalError, UsageError, import_extra

_TRANSIENT_CODES = ("RequestTimeout", "Throttling", "ThrottlingException")
"""Those that do not come with a status of the server's errors."""
_PART_BYTES = 16 << 20
_MOST_PARTS = 10_000
_PARTS_AT_ONCE = 4


class S3Objects(Objects):
    """Objects in S3. boto3 finds credentials, the region and the endpoint."""

    CHECKS = "the endpoint (AWS_ENDPOINT_URL, the region)"

    def __init__(self, location: str, deadline_s: float) -> None:
        """Parse the location; sends no request.

        Raises:
            UsageError: no bucket is named, or boto3 is not installed.
        """
        super().__init__(location, deadline_s)
        self.client = _client()

    def put_file(self, name: str, path: Path) -> None:
        num_bytes = path.stat().st_size
        if num_bytes <= _PART_BYTES:
            self.put(name, path.read_bytes())
            return
        target = {"Bucket": self.bucket, "Key": self.prefix + name}

        def send(request: str, **more: Any) -> Any:
            def once() -> Any:
                with self._errors(name, "s3:PutObject"):
                    return getattr(self.client, request)(**target, **more)

            return self.repeated(name, "written", once)

        size = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))
        upload = send("create_multipart_upload")["UploadId"]

        def send_part(number: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek((number - 1) * size)
                answer = send("upload_part", UploadId=upload, PartNumber=number, Body=file.read(size))
            kept = {name: value for name, value in answer.items() if name.startswith("Checksum")}
            return {"PartNumber": number, "ETag": answer["ETag"], **kept}

        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
                parts = list(pool.map(send_part, range(1, -(-num_bytes // size) + 1)))
            send("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            with contextlib.suppress(Exception):
                self.client.abort_multipart_upload(**target, UploadId=upload)
            raise

    def abandon_parts(self, below: str) -> None:
        def once() -> None:
            with self._errors(below, "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload"):
                pages = self.client.get_paginator("list_multipart_uploads")
                for page in pages.paginate(Bucket=self.bucket, Prefix=self.prefix + below):
                    for upload in page.get("Uploads", ()):
                        self.client.abort_multipart_upload(
                            Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )

        self.repeated(below, "listed", once)

    def _get(self, name: str, start: int, size: int | None, check: Check) -> bytes:
        asked = {} if size is None else {"Range": f"bytes={start}-{start + size - 1}"}
        with self._errors(name, "s3:GetObject"):
            answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + name, **asked)
            with closing(answer["Body"]) as body:
                length = int(answer.get("ContentRange", "").rpartition("/")[2] or answer["ContentLength"])
                modified = answer.get("LastModified")
                check(length, Version(answer.get("ETag", ""), modified.timestamp() if modified else 0.0))
                # a server without support for ranges sends the whole object
                data: bytes = body.read(None if size is None else size + 1)
                return data

    def _put(self, name: str, data: bytes) -> None:
        with self._errors(name, "s3:PutObject"):
            self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=data)

    def _names(self, below: str) -> list[str]:
        with self._errors(below, "s3:ListBucket"):
            pages = self.client.get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=self.bucket, Prefix=self.prefix + below)
            keys = [entry["Key"] for page in found for entry in page.get("Contents", ())]
        return [key.removeprefix(self.prefix) for key in keys]

    def _remove(self, name: str) -> None:
        with self._errors(name, "s3:DeleteObject"):
            self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name)

    @contextlib.contextmanager
    def _errors(self, name: str, permission: str) -> Iterator[None]:
        """Raise boto3's errors as those of :class:`Objects`."""
        from botocore import exceptions

        uri = self.uri(name)
        try:
            yield
        except exceptions.ClientError as error:
            raise self._refused(uri, error.response, permission) from None
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise UsageError(
                f"{uri}: {str(error).rstrip('.')}; name a profile (AWS_PROFILE), set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give the machine a role"
            ) from None
        except (
            exceptions.ConnectionError,
            exceptions.HTTPClientError,
            exceptions.IncompleteReadError,
        ) as error:
            raise Transient(" ".join(str(error).split())) from None
        except exceptions.BotoCoreError as error:
            raise UsageError(f"{uri}: {error}") from None

    def _refused(self, uri: str, response: dict[str, Any], permission: str) -> Exception:
        """Return the error to raise for an error response."""
        problem = response.get("Error", {})
        code, message = str(problem.get("Code", "")), str(problem.get("Message", "")).rstrip(".")
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status >= 500 or status == 429 or code in _TRANSIENT_CODES:
            return Transient(f"{status} {code}")
        if code == "NoSuchBucket":
            return UsageError(f"{uri}: there is no bucket {self.bucket!r}; check its name")
        if status == 404:
            return ShoalError(f"{uri} does not exist; check the prefix, or upload the folder again")
        if code == "InvalidRange":
            return ShoalError(
                f"{uri} was cut short: it has less than the bytes of the manifest; upload it again"
            )
        return UsageError(
            f"{uri}: refused with {status} {code} ({message}); the credentials need {permission} for it"
        )


def _client() -> Any:
    boto3 = import_extra("boto3", "aws", "objects in S3 are read and written with boto3")
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        config=Config(
            retries={"total_max_attempts": 1},  # the retries of Objects know the deadline
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            max_pool_connections=NUM_CONNECTIONS,
        ),
    )
