"""A drafter that follows its policy: a callback for TRL's trainers, and for any `Trainer` of transformers that generates.

Needs the extra `train`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging

from dflash.checkpoints import read_licence
from dflash.common.fingerprints import fingerprint
from dflash.common.stopwatch import stopwatch
from dflash.engine.history import History
from dflash.engine.many_texts import drafting_of
from dflash.engine.state import PairState
from dflash.model.configuration_dflash import Checks, check_values, is_a, is_number, is_whole_number
from dflash.training import ADAPTATION, OnlineTrainer, Rollouts, TrainingSettings


logger = logging.get_logger(__name__)

# Verify steps by which a tau is judged.
LEAST_STEPS = 32


def _is_share(value: Any) -> bool:
    return is_number(value, 0, 1)


def _is_count(value: Any) -> bool:
    return is_whole_number(value, 1)


SETTINGS: Checks = {
    "every": (_is_count, "use a number of optimizer steps from 1 on, or leave it out"),
    "when_tau_falls": (_is_share, "use a share of the best tau, from 0 to 1, or leave it out"),
    "steps": (_is_count, "use a number of the drafter's steps from 1 on"),
    "most_texts": (_is_count, "use a number of texts from 1 on"),
    "time_share": (_is_share, "use a share of the run's seconds, from 0 to 1"),
    "history": (is_a(History), "pass a dflash.History, or leave it out"),
}


class DrafterCallback(TrainerCallback):
    """Trains a pair's drafter between the optimizer steps of its policy, on what the policy writes.

    The policy is the model of a pair's folder. Its texts keep their distribution: a drafter decides how soon a token comes, never
    the token. The policy's weights, modes and random numbers are not changed.

    While the trainer runs, as many tokens are drafted as pay, and none in batches in which no draft pays, unless the pair's
    settings say `"adaptive": false`.

    The trainer's log gets `drafter/tau`, `drafter/tokens_per_step`, `drafter/seconds` (since the last line) and `drafter/steps`. A
    process trains the drafter that it drafts with; several processes have one each.

    Args:
        every: Trains after every so many optimizer steps.
        when_tau_falls: Trains after each optimizer step before which tau was below the best one by more than this share. It is
            that of whole blocks, by how often their tokens were accepted, however wide the steps were.
        steps: Steps of the drafter in one round.
        settings: The recipe, that of `dflash adapt` by default.
        most_texts: Newest texts that are kept to train on.
        time_share: A round is left out if rounds would take more than this share of the run's seconds. `None`: no limit.
        has_permission: Train also a drafter whose licence allows no derivatives, because its authors do.
        history: Earlier texts, which the policy's drafts are taken from, too, and to which its texts are added.

    Raises:
        ValueError: for settings out of range, at once. When training begins: for a policy that is no pair or has no drafter of
            this package, a licence that forbids changed copies, or a tokenizer that is not the drafter's.

    Example:
        >>> callback = DrafterCallback(when_tau_falls=0.05)
        >>> trainer = GRPOTrainer("Qwen3-8B-pair", reward, args=config, train_dataset=data, callbacks=[callback])
        >>> trainer.train()
        >>> callback.drafter.save_pretrained("Qwen3-8B-DFlash-tuned")
    """

    def __init__(
        self,
        every: int | None = None,
        when_tau_falls: float | None = None,
        *,
        steps: int = 8,
        settings: TrainingSettings = ADAPTATION,
        most_texts: int = 128,
        time_share: float | None = 0.15,
        has_permission: bool = False,
        history: History | None = None,
    ) -> None:
        given = {
            "every": every,
            "when_tau_falls": when_tau_falls,
            "steps": steps,
            "most_texts": most_texts,
            "time_share": time_share,
            "history": history,
        }
        check_values(given, SETTINGS)
        if every is None and when_tau_falls is None:
            raise ValueError("every and when_tau_falls are left out, so nothing would be trained: give one of them.")
        self.every = every
        self.when_tau_falls = when_tau_falls
        self.steps = steps
        self.settings = settings
        self.most_texts = most_texts
        self.time_share = time_share
        self.has_permission = has_permission
        self.history = history
        self.rollouts = Rollouts(most_texts)
        self.best_tau = 0.0
        self.drafter: Any = None
        self.trainer: Any = None
        self._pair: Any = None
        self._drafting: Any = None
        self._settings_before: dict[str, Any] = {}
        self.seconds = 0.0  # of all rounds
        self._logged_seconds = 0.0
        self._logged = Rollouts(1)  # counts since the last line
        self._clock = stopwatch()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, processing_class: Any = None, **_: Any
    ) -> None:
        """Finds the drafter of the policy, and begins to watch what becomes of its drafts."""
        self.on_train_end(args, state, control)  # of a run that raised, which transformers does not end
        policy = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter of peft
        drafting = drafting_of(policy)
        drafter = drafting.drafter
        if drafter is None or drafter.engine is None:
            raise ValueError(
                "The pair has no drafter of this package, and none is trained: make it anew by dflash pair."
            )
        self._check_licence(drafter.name_or_path)
        _check_tokenizer(Path(policy.config._name_or_path), processing_class)
        self.drafter = drafter
        self.trainer = OnlineTrainer(drafter, policy, self.settings)
        self._pair = PairState.of(drafter, policy)
        self._pair.watch(self._watch)
        self._drafting = drafting
        self._settings_before = drafting.settings
        drafting.settings = {"adaptive": True, **drafting.settings, "history": self.history}
        self.rollouts = Rollouts(self.most_texts)
        self.best_tau = self.seconds = self._logged_seconds = 0.0
        self._logged = Rollouts(1)
        self._clock = stopwatch()

    def _watch(self, sequences: Any, blocks: Any) -> None:
        self.rollouts.watch(sequences, blocks)
        self._logged.watch(sequences, blocks)

    def _check_licence(self, drafter: str) -> None:
        licence = read_licence(drafter)
        if licence.forbids_changed_copies and not self.has_permission:
            raise ValueError(
                f"The licence {licence.inherited} of {drafter} allows no derivatives, and training makes one: use a drafter of "
                "your own, or pass has_permission=True if its authors allow it."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trains the drafter if it is time to."""
        if self.trainer is None:
            return
        rollouts = self.rollouts
        pad_token_id = self.trainer.target.generation_config.pad_token_id
        rollouts.collect(pad_token_id, self.drafter.config.block_size)
        self._logged.collect(pad_token_id, 0)
        if not rollouts.examples or not self._is_due(state.global_step):
            return
        clock = stopwatch()
        self.trainer.train(list(rollouts.examples), self.steps)
        self.seconds += clock()

    def _is_due(self, global_step: int) -> bool:
        is_due = self.every is not None and global_step % self.every == 0
        rollouts = self.rollouts
        if rollouts.num_drafted_steps >= LEAST_STEPS:
            tau = rollouts.tau_of(self.drafter.config.num_proposals)
            self.best_tau = max(self.best_tau, tau)
            least = (1 - (self.when_tau_falls or 0)) * self.best_tau
            is_due |= self.when_tau_falls is not None and tau < least
            rollouts.clear_counts()
        return is_due and self._has_time()

    def _has_time(self) -> bool:
        """Whether a further round stays within the share of the run's seconds."""
        if self.time_share is None:
            return True
        num_rounds = self.trainer.num_steps // self.steps
        of_round = self.seconds / max(num_rounds, 1)
        return self.seconds + of_round <= self.time_share * self._clock()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """Adds the drafter's figures to a line of the log."""
        counts = self._logged
        if self.trainer is None or not counts.num_steps:
            return
        figures = {
            "drafter/tau": counts.tau,
            "drafter/tokens_per_step": counts.tokens_per_step,
            "drafter/seconds": self.seconds - self._logged_seconds,
            "drafter/steps": self.trainer.num_steps,
        }
        logs.update(figures)
        state.log_history[-1].update(figures)
        self._logged_seconds = self.seconds
        counts.clear_counts()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Watches no longer. The drafter stays as it is trained, and requests are as they were before."""
        if self._pair is not None:
            self._pair.watchers.remove(self._watch)
            self._drafting.settings = self._settings_before
        self.trainer = self._pair = self._drafting = None


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer with other tokens than that of the pair's folder, if it has one."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is None or not (folder / "tokenizer_config.json").is_file():
        return
    own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if fingerprint(own.get_vocab()) != fingerprint(tokenizer.get_vocab()):
        raise ValueError(
            f"The policy's tokenizer has {len(tokenizer)} tokens and is not the drafter's, of {len(own)}: begin with the pair's own "
            "tokenizer."
        )
