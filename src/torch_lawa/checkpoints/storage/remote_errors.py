"""Errors of remote file systems, translated: which URL, what is wrong, what to do next.

fsspec passes on the exceptions of the library behind each protocol. They are recognised by the
names of their classes, so that none of these libraries has to be installed.
"""

import contextlib
from collections.abc import Iterator

from torch_lawa.errors import ConfigError, FormatError, LawaError

__all__ = ["package_for", "translated_errors"]

_PACKAGES = {
    "s3": "torch-lawa[s3]", "s3a": "torch-lawa[s3]", "gs": "gcsfs", "gcs": "gcsfs",
    "az": "adlfs", "abfs": "adlfs", "adl": "adlfs", "hf": "huggingface_hub",
    "http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko",
}  # fmt: skip
_LOG_IN = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket "
    "set FSSPEC_S3_ANON=true.",
    "gs": "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS.",
}
_ENDPOINT = {"s3": " and AWS_ENDPOINT_URL"}
_UNREACHABLE = {
    "ConnectionError", "TimeoutError", "HTTPClientError", "IncompleteReadError",
    "ClientConnectionError", "ClientPayloadError",
}  # fmt: skip
_SETTINGS = {"ValueError", "TypeError", "BotoCoreError"}  # a bad profile, region, name, ...


def package_for(protocol: str) -> str | None:
    """The package to install for a protocol, if it is known.

    >>> package_for("gs")
    'gcsfs'
    """
    return _PACKAGES.get(protocol)


@contextlib.contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Translate the errors of requests for `url`.

    What the user can fix becomes a `ConfigError`. A server that is down or fails stays an
    `OSError`, since it may recover; so does a missing file, which the caller interprets.
    """
    try:
        yield
    except LawaError:
        raise
    except FileNotFoundError as error:
        # fsspec's HTTP file system reports every failure as a missing file.
        cause = error.__cause__
        refused = getattr(cause, "status", 404) not in (404, 410)
        if isinstance(cause, Exception) and (refused or _names(cause) & _UNREACHABLE):
            raise _explained(url, cause) from error
        if _code(error) == "NoSuchBucket" or (_code(error) == "404" and "/" not in _path(url)):
            bucket = f"{url.partition('://')[0]}://{_path(url).partition('/')[0]}"
            raise ConfigError(
                f"{url}: the bucket {bucket} does not exist. Check its name"
                f"{_ENDPOINT.get(_family(url), '')}; lawa does not create buckets."
            ) from error
        raise
    except Exception as error:
        raise _explained(url, error) from error


def _explained(url: str, error: Exception) -> Exception:
    text, names = " ".join(str(error).split()).rstrip("."), _names(error)
    log_in = _LOG_IN.get(_family(url), "Log in first.")
    if any("Credentials" in name for name in names):
        return ConfigError(f"{url}: no credentials ({text}). {log_in}")
    if isinstance(error, PermissionError):
        return ConfigError(
            f"{url}: permission denied by the server ({text}). Check the account and its "
            f"permissions. {log_in}"
        )
    if "range is not satisfiable" in text:
        return FormatError(f"{url}: became shorter while it was read.")
    if names & _UNREACHABLE:
        return ConnectionError(
            f"{url}: the server cannot be reached ({text}). Check the network"
            f"{_ENDPOINT.get(_family(url), '')}, and try again."
        )
    if names & _SETTINGS:
        return ConfigError(f"{url}: {text}. Check the URL and the settings for its server.")
    return OSError(f"{url}: the server failed ({type(error).__name__}: {text}). Try again.")


def _names(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _code(error: Exception) -> str:
    """The code of the S3 response behind an error, if there is one."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code")) if isinstance(answer, dict) else ""


def _family(url: str) -> str:
    protocol = url.partition("://")[0]
    return {"s3a": "s3", "gcs": "gs"}.get(protocol, protocol)


def _path(url: str) -> str:
    return url.partition("://")[2]
