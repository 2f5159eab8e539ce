"""`--trace` of the commands that decode: the texts and where drafts were rejected, added to a file for `dflash adapt`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from dflash.common.files import check_output, only_writer

from .arguments import result_option
from .loading import Pair, say_once


TraceFile = Annotated[
    Path | None,
    result_option(
        "--trace",
        help="Add the texts and the places of rejected drafts to this .jsonl file, which dflash adapt reads.",
    ),
]
# Decodes input_ids [1, S]; its second argument is called with each block. It returns a TimedRun.
Decode = Callable[..., Any]


def check_trace_file(trace: Path | None, others: Sequence[Path] = ()) -> None:
    """Raises ValueError or OSError if nothing could be added to `trace`, or if it is one of the command's `others`."""
    if trace is None:
        return
    from dflash.training import Trace

    Trace.check_name(trace)
    if trace.resolve() in [other.resolve() for other in others]:
        raise ValueError(f"--trace {trace} is also a file that this command reads or writes: name another file.")
    check_output(trace)


@contextmanager
def recording(trace: Path | None, pair: Pair, target: str, rank: int = 0) -> Iterator[Callable[[Decode], Decode]]:
    """Makes ways of decoding add their texts to `trace`, each prompt once, while the body runs; without one, changes nothing.

    `rank` is the number of this process. The first one keeps other commands from adding, and joins the parts of all, so in
    it the body must end last. ValueError for a file that is no trace of this pair.
    """
    if trace is None:
        yield lambda decode: decode
        return
    if rank:
        yield _Recorder(trace, pair, target, rank)
        return
    with only_writer(trace):
        recorder = _Recorder(trace, pair, target)
        say_once(f"The texts are added to {trace}, with the places where drafts were rejected (--trace).")
        yield recorder
        recorder.trace.join()


class _Recorder:
    """What [`recording`] gives."""

    def __init__(self, path: Path, pair: Pair, target: str, rank: int = 0) -> None:
        from dflash.training import Trace

        self.trace = Trace(path, pair.target, pair.tokenizer, target, rank)
        self._prompts: set[tuple[int, ...]] = set()

    def __call__(self, decode: Decode) -> Decode:
        """`decode`, which also records."""
        from dflash.training import recorded

        def decode_and_record(input_ids: Any, on_block: Callable[[Any], None] | None = None, **options: Any) -> Any:
            blocks: list[Any] = []

            def keep(block: Any) -> None:
                blocks.append(block)
                if on_block is not None:
                    on_block(block)

            prompt = input_ids[0].tolist()
            try:
                return decode(input_ids, keep, **options)
            finally:  # a text that was interrupted, too
                if blocks and tuple(prompt) not in self._prompts:
                    self._prompts.add(tuple(prompt))
                    list(recorded(blocks, [prompt], self.trace))

        return decode_and_record
