"""`dflash canary`: compares a server with DFlash to one without, before you switch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from dflash.common.files import check_output

from .arguments import (
    PROMPT_FILE,
    ApiKeyEnv,
    BaselineModel,
    Hardware,
    Model,
    Output,
    Overwrite,
    Thinking,
    option,
    panel,
    prompt_option,
    result_option,
    server_option,
)
from .loading import api_key, heldout_dialogues, numbers, read_prompts
from .terminal import progress_bar, show_table


load_option, goal_option = panel("Load"), panel("Targets and cost")


@dataclass
class CanaryServers:
    """The server without DFlash, and how both servers are asked."""

    baseline_url: Annotated[str | None, server_option("The same model served without DFlash.")] = None
    model: Model = None
    baseline_model: BaselineModel = None
    api_key_env: ApiKeyEnv = None
    timeout: Annotated[float, server_option("Longest silence of a server, in seconds.", min=1)] = 600.0
    hardware: Hardware = None


@dataclass
class LoadOptions:
    """Fields of `Load`."""

    concurrency: Annotated[str, load_option("Numbers of concurrent requests, one for each level.")] = "1,2,4,8,16,32"
    rounds: Annotated[
        int, load_option("Requests per level, as a multiple of its concurrency; at least 16 in all.", min=1)
    ] = 4
    max_new_tokens: Annotated[int, load_option("Longest answer, in tokens.", min=2)] = 512
    temperature: Annotated[float, load_option("0 decodes greedily, and texts are compared.", min=0)] = 0.0
    seed: Annotated[int, load_option("Seed of the order of the prompts.", min=0)] = 0
    target_ms_per_output_token: Annotated[
        float | None, goal_option("Largest p99 of the time per token.", "--target-ms-per-token", min=0)
    ] = None
    target_ms_to_first_token: Annotated[
        float | None, goal_option("Largest p99 of the time to the first token.", min=0)
    ] = None
    price_per_hour: Annotated[
        float | None, goal_option("Price of a server, to report the cost of a token.", min=0)
    ] = None


def canary(
    *,
    url: Annotated[str, option("The server with DFlash, such as http://localhost:8000.")],
    servers: CanaryServers,
    prompts: Annotated[
        Path | None,
        prompt_option(f"Your own traffic. {PROMPT_FILE}."),
    ] = None,
    thinking: Thinking = False,
    requests: LoadOptions,
    output: Output = None,
    plot: Annotated[Path | None, result_option("PNG to write: throughput against latency.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Measures a server with DFlash and one without under the same load: waits, throughput, acceptance, cost."""
    levels = tuple(sorted(set(numbers(requests.concurrency, "--concurrency", minimum=1))))
    for path in filter(None, (output, plot)):
        check_output(path, overwrite)
    if output is not None and plot is not None and output.resolve() == plot.resolve():
        raise ValueError(f"--plot {plot} is the file that --output writes: give it another name.")
    dialogues = heldout_dialogues() if prompts is None else read_prompts(prompts)
    key = api_key(servers.api_key_env)

    from dflash.common.provenance import write_result
    from dflash.evaluation import Load, Server, run_canary, save_drawing

    load = Load(**vars(requests) | {"concurrency": levels, "thinking": thinking})
    asked = {}
    baseline = ("baseline", servers.baseline_url, servers.baseline_model or servers.model)
    for name, address, model in (baseline, ("dflash", url, servers.model)):
        if address is not None:
            server = Server(address, key, servers.timeout)
            asked[name] = (server, server.only_model(model))
    with progress_bar("Asking the servers", num_steps=len(levels) * len(asked)) as advance:
        result = run_canary(asked, dialogues, load, advance, servers.hardware)
    if output is not None:
        write_result(output, result)
    _show(result)
    if plot is not None:
        save_drawing(result, "latency_throughput", plot)


def _show(result: dict[str, Any]) -> None:
    """Prints the table, the best level of each server, and a warning if prompts were repeated."""
    from dflash.evaluation import table_of

    show_table(table_of(result["summary"]), num_names=2)  # a row is named by its server and its level
    console = Console(highlight=False)
    for name, row in result["at_target"].items():
        best = "no level" if row is None else f"{row['tokens_per_second']:.0f} tokens/s, {row['concurrency']} at once"
        console.print(f"Within the target, {name}: {best}", style="bold")
    if result["decoding"]["prompts_repeat"]:
        sentence = "There were fewer prompts than requests: later ones may come from the server's prefix cache."
        console.print(sentence, style="dim")
