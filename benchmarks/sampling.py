"""What is accepted at a temperature, by what is proposed and by which rule it is judged.

    python benchmarks/sampling.py --output benchmarks/results/sampling_tiny.json

Two questions, neither of which needs a clock:

 * The embedded pair at temperature 1: the drafter's argmax, against rows drawn independently of each other from its
   law, which know nothing of what the row before them drew.
 * Token-by-token rejection against block verification, for a drafter whose law is written down: target and drafter are
   Markov chains, the drafter's a mixture of the target's with another.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from records import prompt_ids, save
from rich.progress import track

from dflash import spec_generate
from dflash.checkpoints import heldout_problems, load_embedded_pair
from dflash.cli.options import show_table
from dflash.evaluation import any_table
from dflash.model.verification_dflash import Proposals, pick, verify_block, verify_rejection


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--rows", type=int, default=20_000, help="blocks of each scripted law")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def draw_rows_independently(drafter: Any) -> Any:
    """A `propose` that draws every row from the drafter's own law, and says that law."""

    def propose(
        hidden_states: torch.Tensor, anchors: torch.Tensor, head: Any, temperature: float = 1.0, uniforms: Any = None
    ) -> Proposals:
        law = (drafter.compute_logits(hidden_states, head).double() / temperature).softmax(dim=-1)  # [B, R, V]
        return Proposals(pick(law, uniforms), torch.arange(law.shape[-1]).expand_as(law), law)

    return propose


def sampled_tau(target: Any, drafter: Any, prompts: list[list[int]], verification: str, max_new_tokens: int) -> Any:
    """Mean acceptance length over all steps of all prompts at temperature 1."""
    lengths: list[int] = []
    for index, prompt in enumerate(track(prompts, description=verification)):
        output = spec_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            max_new_tokens=max_new_tokens,
            temperature=1.0,
            top_k=0,
            generator=torch.Generator().manual_seed(index),
            verification=verification,
            return_dict_in_generate=True,
        )
        lengths += output.acceptance_lengths[0]
    return round(sum(lengths) / len(lengths), 4)


def scripted(share: float, num_proposals: int, num_rows: int, vocab_size: int = 32) -> dict[str, Any]:
    """Accepted proposals per block, where the drafter's law has `share` of the target's."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    target, other = (2.0 * noise).softmax(dim=-1)
    drafter = share * target + (1 - share) * other
    tokens, laws = torch.zeros(num_rows, 1, dtype=torch.long), []
    for _ in range(num_proposals):
        laws.append(drafter[tokens[:, -1]])
        uniforms = torch.rand(num_rows, generator=generator, dtype=torch.float64)
        tokens = torch.cat([tokens, pick(laws[-1], uniforms)[:, None]], dim=1)
    candidates = torch.arange(vocab_size).expand(num_rows, num_proposals, vocab_size)
    proposals = Proposals(tokens[:, 1:], candidates, torch.stack(laws, dim=1))
    uniforms = torch.rand(num_rows, num_proposals + 1, generator=generator, dtype=torch.float64)
    accepted = {
        name: verify(proposals, target[tokens].log(), uniforms).num_accepted.double().mean().item()
        for name, verify in (("rejection", verify_rejection), ("block", verify_block))
    }
    return {
        "share_of_the_targets_law": share,
        "proposals": num_proposals,
        **{f"accepted_by_{name}": round(mean, 4) for name, mean in accepted.items()},
        "gain": round(accepted["block"] / accepted["rejection"], 4),
    }


def main() -> None:
    args = arguments()
    target, drafter, tokenizer = load_embedded_pair()
    prompts = [prompt_ids(tokenizer, problem.question) for problem in heldout_problems()[: args.prompts]]
    taus = {"argmax, match": sampled_tau(target, drafter, prompts, "match", args.max_new_tokens)}
    drafter.propose = draw_rows_independently(drafter)
    for verification in ("rejection", "block"):
        name = f"rows drawn independently, {verification}"
        taus[name] = sampled_tau(target, drafter, prompts, verification, args.max_new_tokens)
    scripts = [scripted(share, num_proposals, args.rows) for num_proposals in (7, 15) for share in (0.5, 0.7, 0.9)]
    summary = [{"proposals": name, "prompts": len(prompts), "tau": tau} for name, tau in taus.items()]
    show_table(any_table(summary))
    show_table(any_table(scripts))
    if args.output is not None:
        save(
            args.output, target, drafter, "sampling", decoding={"temperature": 1.0}, summary=summary, scripted=scripts
        )


if __name__ == "__main__":
    main()
