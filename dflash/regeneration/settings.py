"""The settings of a regeneration run."""

from dataclasses import dataclass

from .target_writer import Sampling


@dataclass(frozen=True, kw_only=True)
class RegenerationSettings(Sampling):
    """Which rows to answer, and how. Extends [`Sampling`]. ValueError for a value out of range."""

    max_new_tokens: int = 2048  # largest number of tokens of an answer; the target's positions limit it too
    seed: int = 0  # of the sampling and of the choice of `samples`; an answer depends on it and on its row's number
    thinking: bool = False  # whether the chat template asks for thinking
    prompt_tokens: int = 16  # number of tokens of a `text` that are its prompt
    # Number of rows, `None` for all. With the same seed, a smaller number gives a subset of the rows of a larger one.
    samples: int | None = None
    split: str = "train"  # the split to read of a data set that has several
    streaming: bool = False  # read a data set only as far as needed: to the first `samples` rows that can be answered
    # Leave out rows that ask the same as another row. Turn it off to sample several answers to one prompt.
    deduplicate: bool = True
    max_prompt_tokens: int | None = None  # leave out rows with a longer prompt; in a chat the first prompt counts
    drop_cut: bool = False  # leave out rows with an answer that was cut off

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt_tokens", "samples", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: use 1 or more.")
        if self.streaming and self.samples is None:
            raise ValueError("streaming needs a number of rows to stop at: give samples (--samples) too.")
