"""What a server's answer means to a user: which place, what is wrong with it, what to do next.

fsspec passes on what the library behind a protocol raises, each its own; they are known here by
their names, so that none of them need be installed.
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
    """What to install for URLs of a protocol, where that is known.

    >>> package_for("gs")
    'gcsfs'
    """
    return _PACKAGES.get(protocol)


@contextlib.contextmanager
def translated_errors(url: str) -> Iterator[None]:
    """Errors of requests for `url`, in our words.

    What a user can set right is a `ConfigError`. That a server is gone or fails is nobody's
    mistake and may pass, so it stays an `OSError`; and so does a missing file, for the caller to
    decide what that means.
    """
    try:
        yield
    except LawaError:
        raise
    except FileNotFoundError as error:
        if _code(error) == "NoSuchBucket" or (_code(error) == "404" and "/" not in _path(url)):
            bucket = f"{url.partition('://')[0]}://{_path(url).partition('/')[0]}"
            raise ConfigError(
                f"{url}: there is no bucket {bucket} here. Check its name"
                f"{_ENDPOINT.get(_family(url), '')}; buckets are not made by lawa."
            ) from error
        raise
    except Exception as error:
        raise _explained(url, error) from error


def _explained(url: str, error: Exception) -> Exception:
    text, names = " ".join(str(error).split()).rstrip("."), _names(error)
    log_in = _LOG_IN.get(_family(url), "Log in to it first.")
    if any("Credentials" in name for name in names):
        return ConfigError(f"{url}: no credentials for it ({text}). {log_in}")
    if isinstance(error, PermissionError):
        return ConfigError(
            f"{url}: the server does not allow it ({text}). Check which account you use and what "
            f"it may do. {log_in}"
        )
    if "range is not satisfiable" in text:
        return FormatError(f"{url}: became shorter while it was read.")
    if names & _UNREACHABLE:
        return ConnectionError(
            f"{url}: the server cannot be reached ({text}). Check the network"
            f"{_ENDPOINT.get(_family(url), '')}, and run it again."
        )
    if names & _SETTINGS:
        return ConfigError(f"{url}: {text}. Check the URL and the settings for its server.")
    return OSError(f"{url}: the server failed ({type(error).__name__}: {text}). Run it again.")


def _names(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _code(error: Exception) -> str:
    """The code of an S3 answer behind an error, if there is one."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code")) if isinstance(answer, dict) else ""


def _family(url: str) -> str:
    protocol = url.partition("://")[0]
    return {"s3a": "s3", "gcs": "gs"}.get(protocol, protocol)


def _path(url: str) -> str:
    return url.partition("://")[2]
