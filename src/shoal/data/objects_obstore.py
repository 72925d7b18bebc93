"""Objects in Google's store (``gs://``) and on web servers (``https://``), by obstore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from shoal.data.objects import CONNECT_S, READ_S, Check, Objects, Transient, Version
from shoal.errors import ShoalError, UsageError, import_extra

_RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""Of each request, parts of an upload included; those of Objects come after them."""
_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4


class ObstoreObjects(Objects):
    """Objects of any store that obstore knows. It finds credentials in its own way."""

    CHECKS = "the credentials (for gs:// GOOGLE_APPLICATION_CREDENTIALS)"

    def __init__(self, location: str, deadline_s: float, **settings: Any) -> None:
        """Parse the location; sends no request.

        Args:
            location: as for :class:`Objects`.
            deadline_s: as for :class:`Objects`.
            settings: further ones of obstore's ``from_url``.

        Raises:
            UsageError: no bucket is named, obstore is not installed, or refuses a setting.
        """
        super().__init__(location, deadline_s)
        self._obstore = import_extra("obstore", "objects", "gs:// and https:// are read with obstore")
        self._errors_of = import_extra("obstore.exceptions", "objects", "gs:// and https:// need obstore")
        stores = import_extra("obstore.store", "objects", "gs:// and https:// need obstore")
        client = {
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(seconds=READ_S),
            "allow_http": True,
        }
        try:
            self._store = stores.from_url(
                self.location, client_options=client, retry_config=_RETRIES, **settings
            )
        except self._errors_of.BaseError as error:
            raise UsageError(f"{self.location}: {_first_line(error)}") from None

    def put_file(self, name: str, path: Path) -> None:
        def once() -> None:
            with self._errors(name):
                self._obstore.put(
                    self._store, name, path, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )

        self.repeated(name, "written", once)

    def _get(self, name: str, start: int, size: int | None, check: Check) -> bytes:
        options = {} if size is None else {"range": (start, start + size)}
        with self._errors(name):
            answer = self._obstore.get(self._store, name, options=options)
            modified = answer.meta["last_modified"].timestamp()  # 0 without one
            check(int(answer.meta["size"]), Version(answer.meta.get("e_tag") or "", modified))
            return bytes(answer.bytes())

    def _put(self, name: str, data: bytes) -> None:
        with self._errors(name):
            self._obstore.put(self._store, name, data, use_multipart=False)

    def _names(self, below: str) -> list[str]:
        with self._errors(below):
            found = [entry["path"] for part in self._obstore.list(self._store, below) for entry in part]
        return [name for name in found if name.startswith(below)]

    def _remove(self, name: str) -> None:
        with self._errors(name), contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._store, name)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Raise obstore's errors as those of :class:`Objects`."""
        known, uri = self._errors_of, self.uri(name)
        try:
            yield
        except FileNotFoundError:  # obstore's NotFoundError is one
            raise ShoalError(f"{uri} does not exist; check the prefix, or upload the folder again") from None
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            raise UsageError(
                f"{uri}: refused ({_first_line(error)}); the credentials need permission for it"
            ) from None
        except (known.NotSupportedError, known.InvalidPathError) as error:
            raise UsageError(f"{uri}: {_first_line(error)}") from None
        except known.BaseError as error:
            raise Transient(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
