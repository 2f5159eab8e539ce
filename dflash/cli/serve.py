"""`dflash serve`: serves a pair with an inference engine's own server."""

from typing import Annotated, Literal

from .arguments import Drafter, Target, argument, option
from .loading import checkpoint


def serve(
    engine: Annotated[Literal["vllm", "sglang", "trtllm"], option("The engine that serves.")],
    target: Target,
    drafter: Drafter,
    engine_args: Annotated[list[str] | None, argument("The engine's own arguments, after --.")] = None,
    block_size: Annotated[
        int | None, option("Tokens in a block, anchor included. Default: the drafter's.", metavar="N")
    ] = None,
    only_print: Annotated[bool, option("Print the command and stop.", "--print")] = False,
    checked: Annotated[bool, option("Refuse what the engine cannot run.", "--check/--no-check")] = True,
) -> None:
    """Serves a pair with vLLM, SGLang or TensorRT-LLM: prints the engine's own command, then runs it."""
    from dflash.checkpoints import declared_block_size, refuse_unfit, run_server, server_command

    if checked:
        target, drafter = checkpoint(target, "--target"), checkpoint(drafter, "--drafter")
        refuse_unfit(engine, target, drafter, block_size)
    block_size = declared_block_size(drafter) if block_size is None else block_size
    command = server_command(engine, target, drafter, block_size, engine_args or ())
    print(command.script(), flush=True)
    if not only_print:
        run_server(command, engine)
