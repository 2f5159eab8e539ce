"""`dflash publish`: uploads the folder of a drafter or a pair to the Hub."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.filesize import decimal

from .arguments import AcceptLicence, TargetOfDrafter, argument, option, panel


if TYPE_CHECKING:
    from dflash.checkpoints import Publication


hub_option = panel("On the Hub")


@dataclass
class HubOptions:
    """The repository and its commit."""

    private: Annotated[bool, hub_option("Only you or the organisation can see it.", "--private")] = False
    revision: Annotated[
        str | None, hub_option("The branch. It is made if it does not exist. Default: main.", metavar="NAME")
    ] = None
    message: Annotated[str | None, hub_option("The message of the commit.", metavar="TEXT")] = None


def publish(
    *,
    folder: Annotated[Path, argument("The drafter's checkpoint, or a pair.", "FOLDER")],
    repo_id: Annotated[str, argument("The repository on the Hub.", "NAMESPACE/NAME")],
    target: TargetOfDrafter = None,
    base_model: Annotated[str | None, option("The target's id on the Hub, for the card.", metavar="ORG/NAME")] = None,
    dry_run: Annotated[bool, option("Print what would be uploaded, and upload nothing.", "--dry-run")] = False,
    hub: HubOptions,
    accept_licence: AcceptLicence = False,
) -> None:
    """Publishes a drafter or a pair on the Hub in one commit, if `dflash check` says that it works.

    The commit holds weights, config, code and card.
    With --target the pair is checked too, and a new card names the target.
    """
    from dflash.checkpoints import licence_lines, plan_publication
    from dflash.checkpoints import publish as publish_it

    publication = plan_publication(folder, repo_id, target, base_model)
    drafter: Path | None = folder
    if publication.is_pair:
        drafter = publication.report.folder if publication.report else None
        target = str(folder)
    licences = licence_lines("publish", drafter, target, accept_licence)
    if dry_run:
        _show(publication)
        print(*licences, sep="\n")
        return
    published = publish_it(publication, **vars(hub))
    if not published.is_new:
        print("Nothing has changed since the last commit.")
    print(*licences, sep="\n", file=sys.stderr)
    print(published.url)
    print(published.load_line)


def _show(plan: "Publication") -> None:
    """Prints the files and their sizes, what is left out, what the card says, and which engines fail on the drafter."""
    for file in plan.files:
        mark = "  (written)" if file.path in plan.written else ""
        print(f"{decimal(file.size):>10}  {file.path}{mark}")
    size = decimal(sum(file.size for file in plan.files))
    print(f"{size:>10}  in {len(plan.files)} files to {plan.repo_id}")
    if plan.left_out:
        print(f"left out: {', '.join(plan.left_out)}")
    print("card:")
    for name in ("license", "base_model", "datasets", "tags"):
        value = plan.card.get(name)
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        remedy = f"write `{name}: …` into a README.md in the folder, between two lines of ---"
        if name == "base_model":
            remedy = "--base-model ORG/NAME gives it"
        print(f"  {name}: {value or f'not said ({remedy})'}")
    if plan.report is None:
        print("The drafter stays on the Hub: `dflash check` says whether it works.")
    for verdict in plan.report.verdicts if plan.report else ():
        if verdict.verdict != "works":
            print(f"{verdict.name} {verdict.verdict}: `dflash check` says why.")
    if "dflash" not in plan.repo_id.lower():
        print('vLLM knows a drafter by "DFlash" in its name: under this one it needs "method": "dflash".')
