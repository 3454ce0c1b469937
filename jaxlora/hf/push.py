"""Uploads adapters to the Hugging Face hub."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ConfigError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def repositories(repository: str, jobs: list[str]) -> dict[str, str]:
    """Returns the repository of each job: the one given, or one for each job.

    Args:
        repository: OWNER/NAME.
        jobs: Names of the jobs. Several get OWNER/NAME-JOB each.

    Raises:
        ConfigError: `repository` is not of the form OWNER/NAME.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(
            f"{repository!r} is no repository of the hub. Give OWNER/NAME."
        )
    if len(jobs) == 1:
        return {jobs[0]: repository}
    return {job: f"{repository}-{job}" for job in jobs}


def open_hub() -> Any:
    """Returns the hub's client.

    Raises:
        ConfigError: There is no token.
    """
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ConfigError(
            "uploading needs a token of the Hugging Face hub with the right to write, "
            "and there is none. Log in with `hf auth login`, or set HF_TOKEN."
        )
    return huggingface_hub.HfApi()


def push(
    folders: Mapping[str, pathlib.Path],
    *,
    private: bool = False,
    hub: Any = None,
) -> list[str]:
    """Uploads folders, each to a repository, which is made if it does not exist.

    Args:
        folders: Complete folders, by the repository that each goes to.
        private: Whether a new repository is private.
        hub: Client of the hub, such as `huggingface_hub.HfApi()`; None: a new one.

    Returns:
        Addresses of the uploads.

    Raises:
        ConfigError: There is no token, or the hub refuses an upload. The text says
            which folders were uploaded before.
    """
    hub = hub or open_hub()
    done: list[str] = []
    for repository, folder in folders.items():
        try:
            hub.create_repo(repository, private=private, exist_ok=True)
            found = hub.upload_folder(
                repo_id=repository,
                folder_path=str(folder),
                commit_message="Upload an adapter trained with jaxlora",
            )
        # Errors of HTTP, of the network and of the client have no common class.
        except Exception as error:
            before = f" Uploaded before: {', '.join(done)}." if done else ""
            raise ConfigError(
                f"{folder} could not be uploaded to {repository}: {error}. Check that "
                "your token may write there (`hf auth whoami`), and run the command "
                f"again: what is there already is not sent twice.{before}"
            ) from error
        done.append(str(found))
    return done
