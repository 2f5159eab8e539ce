"""`dflash adapt`: trains a drafter further on a user's prompts or texts, and keeps the state that accepts most."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from dflash.training import ADAPTATION, DRAFTER

from . import loading
from .arguments import Drafter, ModelOptions, Target, option, panel
from .regenerate import answer_bar, load_writer
from .train import StartOptions, announce, chosen_of, finished, say_complete, say_licences, settings_options


written_option = panel("What the target writes")


@dataclass
class AdaptationData:
    """The texts to train on, and the checkpoint to write."""

    data: Annotated[list[str], option("Prompts, texts, answers or a trace. May be repeated; each is reported.")]
    output: Annotated[Path, option("Folder of the checkpoint.")]
    general: Annotated[
        str | None,
        option("Other texts, of a kind that the drafter is good at, mixed in so that it stays good at them."),
    ] = None
    general_share: Annotated[float, option("Largest share of the tokens that may come from --general.")] = 0.3


@dataclass
class AdaptationAnswers:
    """Some fields of `RegenerationSettings`."""

    samples: Annotated[int | None, written_option("Rows of each file to answer. Default: all.", min=1)] = None
    streaming: Annotated[
        bool, written_option("Answer the first --samples rows; download nothing after them.", "--streaming")
    ] = False
    max_new_tokens: Annotated[int, written_option("Longest answer, in tokens.", min=1)] = 512


# Topics and settings that are options of this command, or have no meaning where a drafter is trained further.
NOT_OF_THE_RECIPE = (DRAFTER, "eval_data", "samples", "streaming")


class AdaptationRecipe(settings_options(ADAPTATION, NOT_OF_THE_RECIPE)):  # type: ignore[misc]  # a computed class
    """The fields of `TrainingSettings` that were given."""


def adapt(
    *,
    target: Target,
    drafter: Drafter,
    texts: AdaptationData,
    answers: AdaptationAnswers,
    batch_size: Annotated[int, written_option("Rows at once.", min=1)] = 8,
    start: StartOptions,
    has_permission: Annotated[
        bool, option("Adapt the drafter although its licence forbids it.", "--i-have-permission")
    ] = False,
    recipe: AdaptationRecipe,
) -> None:
    """Trains a drafter further on your texts, and keeps the state that accepts most.

    The target first answers the texts. Files that already hold answers
    (of dflash regenerate, or its --trace) are used as they are.
    """
    target = loading.checkpoint(target, "--target")
    drafter = loading.checkpoint(drafter, "--drafter")
    settings = ADAPTATION.changed(**chosen_of(recipe), init=drafter)
    loading.hide_loading_bars()
    from dflash.checkpoints import read_licence
    from dflash.common.processes import Processes
    from dflash.regeneration import answer_sources
    from dflash.training import adapt as adapt_it
    from dflash.training import adaptation_sources, check_split, claimed

    output = texts.output
    sources = adaptation_sources(texts.data, settings, texts.general, texts.general_share)
    check_split(sources.values(), settings.split)
    say_licences("adapt", drafter, target, has_permission)
    # The output is claimed now, so that its errors are not raised after the answers are written.
    with claimed(output, settings, **vars(start)) as claim:
        paths = list(sources.values())
        if claim.finished is None:
            folder = output.with_name(f"{output.name}.answers")
            models = ModelOptions(trust_remote_code=settings.trust_remote_code)
            load = partial(load_writer, target, drafter, batch_size, loading.on_own_device(models, Processes()))
            bar = partial(answer_bar, loading.is_first_process())
            answering = _answering(answers, settings)
            paths = answer_sources(sources, folder, load, answering, target, start.overwrite, announce, bar)
        general = None if texts.general is None else paths.pop()
        record = finished(
            adapt_it,
            target,
            drafter,
            paths,
            output,
            settings,
            general=general,
            general_share=texts.general_share,
            claim=claim,
            on_point=_print_point,
            # `say_licences` raised no error, so the user has permission if the licence forbids changed copies.
            provenance={"has_permission": read_licence(drafter).forbids_changed_copies},
        )
    if loading.is_first_process():
        _print_result(output, record)


def _answering(answers: AdaptationAnswers, settings: Any) -> Any:
    """Returns the settings of the target's answers."""
    from dflash.regeneration import RegenerationSettings

    shared = {name: getattr(settings, name) for name in ("split", "thinking", "seed", "deduplicate")}
    return RegenerationSettings(**vars(answers), **shared)


def _print_point(point: dict[str, Any]) -> None:
    """Prints the tau of each domain at one point of the training."""
    taus = [f"{name} {domain['tau']:.2f}" for name, domain in point["domains"].items()]
    print(f"step {point['step']}: tau {', '.join(taus)}", flush=True)


def _print_result(output: Path, record: Any) -> None:
    """Prints the acceptance before and after the training, by domain and position."""
    domains_at = {point["step"]: point["domains"] for point in record.curve}
    before = domains_at[0]
    after = domains_at[record.best_step]
    for name, first in before.items():
        last = after[name]
        print(f"{name}: tau {first['tau']:.2f} before, {last['tau']:.2f} after; accepted by position")
        print(f"  before  {_shares(first)}")
        print(f"  after   {_shares(last)}")
    kept = "the drafter as it began: no other state accepted more without losing over 2 % on a file"
    if record.best_step:
        kept = f"step {record.best_step}"
    say_complete(output, kept, record)


def _shares(domain: dict[str, Any]) -> str:
    """Returns the accepted shares of the positions as text."""
    return " ".join(f"{share:.2f}" for share in domain["accepted"])
