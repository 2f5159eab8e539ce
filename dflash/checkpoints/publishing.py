"""A drafter's or a pair's folder to the Hub in one commit: weights, config, code and card, and no other file."""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from dflash.common.cards import drafter_card, pair_card
from dflash.common.json_text import parsed_json
from dflash.common.messages import first_line

from .folders import FILES
from .rules import Report, check
from .rules.checkpoint_files import read_json


CARD, DOOR, PAIR = "README.md", "custom_generate/generate.py", "dflash.json"

# Files of a former checkpoint or pair, as whole paths: left in the repository, they would be read together with the new files.
STALE = (
    "/model.safetensors", "/model-*-of-*.safetensors", "/model.safetensors.index.json", "/*_dflash.py", "/custom_generate/*",
    "/drafter/*"
)  # fmt: skip
SECRETS = (
    ".env", ".env.*", ".netrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc", "*.pem", "*.key", "*.p12", "*.pfx",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "token", "token.txt", "*.token", "credentials*", "secrets*"
)  # fmt: skip
TRAINING_STATE = (
    "optimizer*", "scheduler*", "scaler.*", "rng_state*", "random_states*", "trainer_state.json", "training_args.bin",
    "checkpoint-*", "global_step*", "*.distcp", "*.ckpt", "state.pt", "pytorch_model_fsdp*", "events.out.tfevents.*",
    "runs", "wandb"
)  # fmt: skip
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NETWORK = ("httpx", "httpx2", "requests", "urllib3")
# Keys of the Hub, OpenAI, GitHub and AWS, and private keys.
KEY = re.compile(
    rb"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{32,}|\bgh[pousr]_[A-Za-z0-9]{36,}|\bAKIA[0-9A-Z]{16}\b"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


@dataclass(frozen=True)
class File:
    """One file of the commit: as it lies on the disk, or the bytes that go instead."""

    path: str
    content: Path | bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def read(self) -> bytes:
        """The bytes."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass(frozen=True)
class Publication:
    """What one commit will hold. `written` are files that the folder lacks or that differ from its own.

    `report` is `None` for a pair whose drafter stays on the Hub, and is not fetched to be checked.
    """

    repo_id: str
    files: tuple[File, ...]
    written: tuple[str, ...]
    left_out: tuple[str, ...]
    report: Report | None
    is_pair: bool = False

    @cached_property
    def card(self) -> dict[str, Any]:
        """The front matter of the card; ValueError if it cannot be read."""
        text = next(file for file in self.files if file.path == CARD).read().decode()
        return dict(_read_card(text).data.to_dict())


@dataclass(frozen=True)
class Published:
    """Where it is, and the commit to load; `is_new` is false where the repository held the same already."""

    repo_id: str
    url: str
    commit: str
    is_new: bool
    is_pair: bool = False

    @property
    def load_line(self) -> str:
        """The line of Python that loads exactly this."""
        loader = "AutoModelForCausalLM" if self.is_pair else "AutoModel"
        return f'{loader}.from_pretrained("{self.repo_id}", trust_remote_code=True, revision="{self.commit}")'


def _read_card(text: str) -> Any:
    """A README.md with its front matter."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard(text)
    except Exception as error:  # whatever its YAML reader makes of it
        raise ValueError(
            f"The front matter of README.md cannot be read ({first_line(error)}): correct the lines between ---."
        ) from error


def plan_publication(
    folder: str | Path, repo_id: str, target: str | None = None, base_model: str | None = None
) -> Publication:
    """The files to upload. Nothing is asked of the Hub but a `target` that is there.

    These are the checkpoint's files in `folder`, the code that its config names, and, where the folder lacks them, a
    card and the `custom_generate` file. In a card, the lines that load the folder load `repo_id` instead.

    Args:
        folder: A drafter's checkpoint, or a pair's folder, which is uploaded whole.
        repo_id: "namespace/name".
        target: Its target, a folder or an id on the Hub: the pair is checked, and a new card names it.
        base_model: The target's id on the Hub, which the card then names.

    Raises:
        ValueError: if transformers cannot run the checkpoint, if the folder holds the state of a training run or what
            looks secret, or if `repo_id` or `base_model` is no name of a repository.
    """
    folder = Path(folder).expanduser().absolute()
    check_repository(repo_id)
    if base_model is not None and not HUB_ID.fullmatch(base_model):
        raise ValueError(f"--base-model {base_model} is no id on the Hub: give namespace/name.")
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the folder of a drafter's checkpoint.")
    is_pair = (folder / PAIR).is_file()
    drafter = _drafter_in(folder) if is_pair else folder
    its_target = str(folder) if is_pair else target
    report = None if drafter is None else working_report(drafter, its_target)
    files, left_out = _sorted_out(folder, is_pair)
    written = _written(folder, files, repo_id, target, base_model)
    files |= {name: File(name, text.encode()) for name, text in written.items()}
    for file in files.values():
        if not file.path.endswith(".safetensors") and KEY.search(file.read()):
            raise ValueError(
                f"{file.path} holds what looks like a secret key: take it out, and revoke it if it is one."
            )
    publication = Publication(
        repo_id,
        tuple(files[name] for name in sorted(files)),
        tuple(written),
        tuple(left_out),
        report,
        is_pair,
    )
    publication.card  # noqa: B018  (refused here rather than by the Hub)
    return publication


def check_token() -> None:
    """Raises ValueError if this machine has no token of the Hub."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError("There is no token of the Hub: run `hf auth login`, or set HF_TOKEN.")


def check_repository(repo_id: str) -> None:
    """Raises ValueError for a name that is none of a repository on the Hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"{repo_id!r} is no name of a repository: give namespace/name, of letters, digits, - _ and ."
        ) from error
    if "/" not in repo_id:
        remedy = f"give your user name or an organisation, as in you/{repo_id}."
        raise ValueError(f"{repo_id!r} says no namespace: {remedy}")


def _sorted_out(folder: Path, is_pair: bool) -> tuple[dict[str, File], list[str]]:
    """The files of a folder that are published, by their paths in it, and the names of what is left out."""
    places = [*folder.glob("custom_generate/*.py")]
    if is_pair:
        for path in sorted(folder.glob("drafter/*")):
            _refuse_private(path)
            if path.is_file():
                places.append(path)
    left_out = []
    code = _named_code(folder)
    for path in sorted(folder.iterdir()):
        _refuse_private(path)
        is_whole = is_pair and not path.name.startswith(".")
        if path.is_file() and (is_whole or path in code or any(map(path.match, FILES))):
            places.append(path)
        elif is_pair and path.name.endswith("_templates"):  # of the target's tokenizer
            places += path.glob("*.jinja")
        elif path.name != "custom_generate" and not (is_pair and path.name == "drafter"):
            left_out.append(f"{path.name}/" if path.is_dir() else path.name)
    files = {}
    for path in places:
        name = path.relative_to(folder).as_posix()
        files[name] = File(name, path)
    return files, left_out


def _refuse_private(path: Path) -> None:
    """Raises ValueError for a file that looks secret, or that is the state of a training run."""
    fault = None
    if any(map(path.match, SECRETS)):
        fault = "looks secret"
    elif any(map(path.match, TRAINING_STATE)):
        fault = "is the state of a training run, which no user of the drafter loads"
    if fault is not None:
        raise ValueError(f"{path.name} {fault}: move it out of the folder before it is published.")


def _written(
    folder: Path, files: Mapping[str, File], repo_id: str, target: str | None, base_model: str | None
) -> dict[str, str]:
    """The files that the folder lacks, and its card where that says something else, by their paths."""
    from dflash.drafter import DFlashConfig
    from dflash.model.generation_dflash import custom_generate_source

    written = {} if DOOR in files else {DOOR: custom_generate_source()}
    before = None
    if CARD in files:
        before = files[CARD].read().decode()
        text = before.replace(f'from_pretrained("{folder.name}"', f'from_pretrained("{repo_id}"')
    elif PAIR in files:
        text = pair_card(repo_id)
    else:
        text = drafter_card(DFlashConfig.from_pretrained(folder), repo_id, target)
    if base_model is not None:
        card = _read_card(text)
        if card.data.to_dict().get("base_model") != base_model:
            card.data.base_model = base_model
            text = str(card)
    if text != before:
        written[CARD] = text
    return written


def _drafter_in(pair: Path) -> Path | None:
    """The folder of a pair's drafter; `None` if it is on the Hub."""
    path = pair / PAIR
    named = read_json(path, "").get("drafter")
    if not isinstance(named, str):
        raise ValueError(f"{path} names no drafter: write the pair again with `dflash pair`.")
    if HUB_ID.fullmatch(named) and not (pair / named).is_dir():
        return None
    drafter = pair / named
    if not drafter.resolve().is_relative_to(pair.resolve()):
        raise ValueError(
            f"{path} names a drafter outside its folder ({named}): write the pair again with `dflash pair`."
        )
    return drafter


def working_report(folder: str | Path, target: str | None = None, name: str | Path | None = None) -> Report:
    """What [`check`] finds; ValueError if transformers, which is what a card's snippet uses, cannot run the drafter.

    `name` is that by which the user knows the drafter; `None`: `folder`.
    """
    report = check(folder, target)
    ours = next(verdict for verdict in report.verdicts if verdict.engine == "remote-code")
    if ours.verdict == "fails":
        first = ours.findings[0]
        why = first.why.rstrip(".")
        fix = first.fix.rstrip(".")
        checked = shlex.quote(str(name or folder))
        raise ValueError(
            f"{first.field} keeps this checkpoint from working in {ours.name} ({why}): {fix}; `dflash check {checked}` says all."
        )
    return report


def publish(
    publication: Publication,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> Published:
    """Uploads a publication in one commit; the repository and the branch are made if there are none.

    The same commit deletes weights and code of a former checkpoint that the publication lacks. Other files of the
    repository stay. Uploading the same again makes no commit.

    Args:
        publication: What is uploaded.
        private: The repository is private; one that is public already is refused.
        revision: The branch; `None` is main.
        message: Of the commit.

    Raises:
        ValueError: without a token or permission, and where the Hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    check_token()
    api = HfApi()
    repo_id = publication.repo_id
    with _explained(repo_id, api.endpoint):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        before = api.model_info(repo_id, revision=revision)
        if private and not before.private:
            raise ValueError(
                f"{repo_id} exists and is public: make it private in its settings first, or leave out --private."
            )
        kind = "pair" if publication.is_pair else "drafter"
        commit = api.create_commit(
            repo_id,
            _operations(publication, [item.rfilename for item in before.siblings or ()]),
            commit_message=message or f"Upload a DFlash {kind}",
            revision=revision,
            parent_commit=before.sha,  # refused if somebody else has committed since
        )
    url = f"{api.endpoint}/{repo_id}"
    if revision:
        url += f"/tree/{revision}"
    return Published(repo_id, url, commit.oid, commit.oid != before.sha, publication.is_pair)


def _operations(publication: Publication, present: list[str]) -> list[Any]:
    """What a commit does in a repository that holds the files `present`."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[Any] = []
    names = {file.path for file in publication.files}
    for name in present:
        if name not in names and any(map(PurePosixPath("/", name).match, STALE)):
            operations.append(CommitOperationDelete(name))
    for file in publication.files:
        operations.append(CommitOperationAdd(file.path, file.content))
    return operations


def _named_code(folder: Path) -> set[Path]:
    """The files that `auto_map` names, and those that they import."""
    from transformers.dynamic_module_utils import get_relative_import_files

    entries = parsed_json((folder / "config.json").read_bytes()).get("auto_map") or {}
    code: set[Path] = set()
    for entry in entries.values():
        path = folder / f"{str(entry).rpartition('.')[0]}.py"
        if path.is_file():
            code |= {path, *map(Path, get_relative_import_files(path))}
    return code


@contextmanager
def _explained(repo_id: str, endpoint: str) -> Iterator[None]:
    """Raises what the Hub and its client refuse as one sentence with the remedy."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    namespace = repo_id.split("/")[0]
    try:
        yield
    except ValueError as error:  # ours, or the Hub's about the card
        raise ValueError(" ".join(str(error).split())) from error  # in one line
    except OfflineModeIsEnabled as error:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be published: unset it.") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        remedies = {
            401: "the Hub does not know the token: run `hf auth login` again, or set HF_TOKEN.",
            403: f"the token may not write to {namespace}: use one with write access, or another namespace.",
            412: "somebody else has committed meanwhile: look at that commit, then publish again.",
        }
        reason = remedies.get(status or 0, f"the Hub refused ({first_line(error)}): try again, or look at {endpoint}.")
        raise ValueError(f"{repo_id} was not published: {reason}") from error
    except Exception as error:
        cause: BaseException | None = error  # versions of the client use several libraries, and wrap their errors
        while cause and not (isinstance(cause, ConnectionError) or type(cause).__module__.split(".")[0] in NETWORK):
            cause = cause.__cause__
        if cause is None:
            raise
        raise ValueError(
            f"{repo_id} was not published: the connection to {endpoint} failed ({type(error).__name__}): try again; "
            "what has arrived is not sent twice."
        ) from error
