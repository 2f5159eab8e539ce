"""The settings of a regeneration run."""

from dataclasses import dataclass

from .target_writer import Sampling


@dataclass(frozen=True, kw_only=True)
class RegenerationSettings(Sampling):
    """Which rows to answer, and how. Extends [`Sampling`]. ValueError for a value out of range."""

    max_new_tokens: int = 2048  # most tokens of an answer, which also ends where the target's positions do
    seed: int = 0  # of sampling and of the choice of `samples`; an answer depends on the seed and its row's number
    thinking: bool = False  # whether the chat template asks for thinking
    prompt_tokens: int = 16  # number of tokens of a `text` that are its prompt
    samples: int | None = None  # number of rows; `None` for all. Fewer rows are a subset of more
    split: str = "train"  # of a data set that has several
    streaming: bool = False  # read a data set only as far as needed: to the first `samples` rows that can be answered
    deduplicate: bool = (
        True  # leave out rows that ask the same as another one; turn off to sample several answers to each
    )
    max_prompt_tokens: int | None = None  # leave out rows with a longer prompt; of a chat, the first prompt counts
    drop_cut: bool = False  # leave out rows with an answer that was cut off

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt_tokens", "samples", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: use 1 or more.")
        if self.streaming and self.samples is None:
            raise ValueError("streaming needs a number of rows to stop at: give samples (--samples) too.")
