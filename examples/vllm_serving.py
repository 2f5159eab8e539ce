"""The pair on an OpenAI-compatible server: prints vLLM's own command, then runs it.

    python examples/vllm_serving.py
    python examples/vllm_serving.py --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16 --port 8001

Also prints a request for the server. vLLM belongs in an environment of its own; if it is not on the PATH, paste the
command there. The embedded pair is written to `demo/` first.
"""

from __future__ import annotations

import json
import shlex

from pair import options, questions

from dflash.checkpoints import (
    check,
    declared_block_size,
    export_embedded_pair,
    refuse_unfit,
    run_server,
    server_command,
)


def main() -> None:
    """Prints the command, then runs it in place of this process."""
    parser = options(__doc__)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    if (arguments.target is None) != (arguments.drafter is None):
        raise SystemExit("--target and --drafter go together: a drafter is trained for one target.")
    target, drafter = arguments.target, arguments.drafter
    if target is None:
        target, drafter = map(str, export_embedded_pair("demo"))
        (verdict,) = check(drafter, target, ("vllm",)).verdicts
        print(f"# {verdict.name}: {verdict.verdict}")

    refuse_unfit("vllm", target, drafter)  # raises for a checkpoint that vLLM would misread
    plan = server_command("vllm", target, drafter, declared_block_size(drafter), ["--port", str(arguments.port)])
    print(plan.script())

    request = {"model": target, "temperature": 0, "messages": [{"role": "user", "content": questions(1)[0]}]}
    address = f"http://localhost:{arguments.port}/v1/chat/completions"
    words = ["curl", address, "-H", "Content-Type: application/json", "-d", json.dumps(request)]
    print(f"# once it is up:\n# {shlex.join(words)}", flush=True)
    if not arguments.tiny:
        run_server(plan, "vllm")


if __name__ == "__main__":
    main()
