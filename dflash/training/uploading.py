"""Puts a run's checkpoints on the Hub while the run goes on. A failed upload is announced and does not end the run."""

from dataclasses import dataclass
from pathlib import Path

from dflash.checkpoints import (
    check_repository,
    check_token,
    licence_lines,
    plan_publication,
    publish,
    read_licence,
)
from dflash.common.messages import Announce

from .settings import TrainingSettings


def check_upload(settings: TrainingSettings) -> None:
    """Raises ValueError for a bad repository name, a missing token, or a licence of `init` that forbids uploads."""
    repo_id, init = settings.publish_to, settings.init
    if repo_id is None:
        return
    try:
        check_repository(repo_id)
        check_token()
    except ValueError as error:
        raise ValueError(f"publish_to={repo_id!r}: {error}") from error
    if init is None:
        return
    licence = read_licence(init)
    if licence.forbids_changed_copies:
        raise ValueError(
            f"publish_to={repo_id!r}: the licence {licence.inherited} of {init} forbids sharing a changed copy; leave "
            "publish_to out, or use `dflash publish --accept-licence` if you have permission."
        )


@dataclass
class Uploads:
    """Uploads a run's checkpoints to the Hub. The initial drafter, the checkpoint of step 0, is not uploaded."""

    folder: Path  # of the checkpoint
    repo_id: str | None  # `None`: nothing is uploaded
    announce: Announce
    step: int = 0  # of the last upload

    def add(self, step: int, is_last: bool = False) -> None:
        """Uploads the checkpoint of `step` in one commit, if it is new or the last of the run.

        A new repository is private. A failure is announced and not raised.
        """
        from huggingface_hub import HfApi

        is_old = step == self.step and not is_last
        if self.repo_id is None or not step or is_old:
            return
        try:
            plan = plan_publication(self.folder, self.repo_id)
            licence_lines("publish", str(self.folder))
            is_new = not HfApi().repo_exists(self.repo_id)
            publication = publish(plan, private=is_new, message=f"Step {step}")
        except Exception as error:  # of any type: a failed upload must not end hours of training
            reason = str(error).strip() or type(error).__name__
            self.announce(f"Step {step:,} was not uploaded, and the run goes on: {reason}")
            return
        self.step = step
        self.announce(f"The checkpoint of step {step:,} was uploaded to {publication.url}.")
