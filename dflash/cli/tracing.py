"""`--trace` of the commands that decode: records texts and rejected drafts in a file for `dflash adapt`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from dflash.common.files import check_output, only_writer

from .arguments import result_option
from .loading import Pair, say_once


TraceFile = Annotated[
    Path | None,
    result_option(
        "Add the texts and the places of rejected drafts to this .jsonl file, which dflash adapt reads.", "--trace"
    ),
]
# A function that decodes input_ids [1, S] and returns a TimedRun. Its second argument is called with each block.
Decode = Callable[..., Any]


def check_trace_file(trace: Path | None, files: Sequence[Path] = ()) -> None:
    """Raises ValueError or OSError if `trace` cannot be written, or if it is one of the command's other `files`."""
    if trace is None:
        return
    from dflash.training import Trace

    Trace.check_name(trace)
    if trace.resolve() in [file.resolve() for file in files]:
        raise ValueError(f"--trace {trace} is also a file that this command reads or writes: name another file.")
    check_output(trace)


@contextmanager
def recording(trace: Path | None, pair: Pair, target: str, rank: int = 0) -> Iterator[Callable[[Decode], Decode]]:
    """Yields a function that makes a way of decoding add its texts to `trace`, each prompt once.

    Without a trace the function changes nothing. `rank` is the number of this process. The first process locks the
    trace for other commands and joins the parts of all processes, so its body must end last. ValueError for a file that
    is not a trace of this pair.
    """
    if trace is None:
        yield lambda decode: decode
        return
    from dflash.training import Trace

    with only_writer(trace) if rank == 0 else nullcontext():
        rows = Trace(trace, pair.target, pair.tokenizer, target, rank)
        if rank == 0:
            say_once(f"The texts are added to {trace}, with the places where drafts were rejected (--trace).")
        yield partial(_recorded, trace=rows, prompts=set())
        if rank == 0:
            rows.join()


def _recorded(decode: Decode, trace: Any, prompts: set[tuple[int, ...]]) -> Decode:
    """Returns `decode` with its texts added to `trace`, except for those of `prompts`, which are already there."""
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
        finally:  # a text that was interrupted is added too
            if blocks and tuple(prompt) not in prompts:
                prompts.add(tuple(prompt))
                list(recorded(blocks, [prompt], trace))

    return decode_and_record
