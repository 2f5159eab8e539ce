"""Draft trees: the likeliest paths, one forward, and a text that is the target's own whatever was proposed."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from families import FAMILIES
from tiny_models import (
    BLOCK_SIZE,
    PAD_TOKEN_ID,
    SMALL,
    TARGET_KINDS,
    ForkingDrafter,
    expected_lengths,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
    request_of,
)
from transformers import LogitsProcessorList, PreTrainedModel

from dflash import Conversation, spec_generate
from dflash.engine.trees import (
    DraftTree,
    TreeAcceptance,
    TreeAcceptor,
    TreeCache,
    TreeProposals,
    TreeProposer,
    verify_tree,
)
from dflash.model.acceptance_dflash import DRAFTER_BROKE, TARGET_BROKE, Proposals
from dflash.model.attention_dflash import target_sees
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import Target


NEW_TOKENS = 30
SCRIPT = [2, 0, BLOCK_SIZE - 1, 1, 3]
GREEDY = {**tiny_models.GREEDY, "max_new_tokens": NEW_TOKENS, "prompt_lookup_num_tokens": 0}
# Families whose masks differ: one window on all layers, windows on some of them, none; grouped experts, latent keys.
MASKED = ("gemma3", "gemma4", "gemma4_shared_kv", "gpt_oss", "mistral", "cohere2", "deepseek_v3", "qwen3_moe", "phi3")


def random_distributions(depth: int, width: int, seed: int) -> tuple[list[list[list[float]]], list[list[int]]]:
    """`log_probs[position][token before][token]` and the ids of `width` tokens at each of `depth` positions."""
    torch.manual_seed(seed)
    log_probs = torch.randn(depth, width, width).double().log_softmax(dim=-1)
    token_ids = torch.stack([torch.randperm(50)[:width] for _ in range(depth)])
    return log_probs.tolist(), token_ids.tolist()


def positions_of(log_probs: Any, token_ids: Any) -> list[list[list[float]]]:
    """What a tree is grown of."""
    return [[ids, *rows] for ids, rows in zip(token_ids, log_probs, strict=True)]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens on the way to each node."""
    found: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*found[parent], token_id))
    return found[1:]


@pytest.mark.parametrize("budget", [1, 5, 17, 60])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_rows", [6, 1])
def test_a_tree_is_the_likeliest_paths(budget: int, seed: int, num_rows: int) -> None:
    log_probs, token_ids = random_distributions(depth=3, width=6, seed=seed)
    log_probs = [rows[:num_rows] for rows in log_probs]
    tree = DraftTree.grown(positions_of(log_probs, token_ids), budget)
    every = [
        (
            math.exp(
                sum(log_probs[d][before % num_rows][i] for d, (before, i) in enumerate(itertools.pairwise((0, *path))))
            ),
            tuple(token_ids[d][i] for d, i in enumerate(path)),
        )
        for depth in (1, 2, 3)
        for path in itertools.product(range(6), repeat=depth)
    ]
    likeliest = sorted(every, reverse=True)[:budget]
    assert paths(tree) == [path for _, path in likeliest]


def test_a_tree_ends_where_there_are_no_more_paths() -> None:
    log_probs, token_ids = random_distributions(depth=2, width=3, seed=0)
    assert len(DraftTree.grown(positions_of(log_probs, token_ids), 100).token_ids) == 3 + 9
    assert DraftTree.grown([], 5).token_ids == []


HEADS = {
    "selector": {"selector_rank": 4, "selector_top_k": 5},
    "Domino": {"gru_hidden_dim": 6, "emb_dim": 4},
    "Domino, but for the first": {"gru_hidden_dim": 6, "emb_dim": 4, "pure_draft_prefix_len": 1},
    "DSpark": {"markov_rank": 4, "markov_head_type": "gated", "enable_confidence_head": True},
}

DRAFTERS = {**HEADS, "JetSpec": {"is_causal": True}}


def deciding_drafter(head: str, **overrides: Any) -> Any:
    """A drafter whose causal head decides: its weights are large."""
    drafter = make_drafter(**DRAFTERS[head], **overrides)
    for name, weight in drafter.named_parameters():
        if name.startswith(("candidate_selector", "prefix_gru", "embed_proj", "markov_head")):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    return drafter


@pytest.mark.parametrize("head_name", HEADS)
def test_a_causal_heads_tree_is_the_likeliest_paths_after_the_anchor(head_name: str) -> None:
    """Promise: each candidate is scored after its own parent, and the chain is the one that `propose` takes."""
    target, drafter = make_target(), deciding_drafter(head_name)
    embed = target.get_input_embeddings()
    causal_head = drafter.causal_head(embed)
    causal_head.top_k = 5
    drafter.causal_head = lambda _: causal_head
    torch.manual_seed(0)
    hidden_states, anchor = torch.randn(3, drafter.config.hidden_size), torch.tensor([7])
    head = target.get_output_embeddings()
    request = SimpleNamespace(max_draft_tokens=None, temperature=0.8)
    drafts: Any = SimpleNamespace(drafter=drafter, request=request, target=SimpleNamespace(head=head), embed=embed)
    log_probs, token_ids = TreeProposer(drafts, 2).branches(hidden_states[None], anchor[None])
    logits, candidate_ids = drafter.compute_logits(hidden_states, head).topk(5, dim=-1)
    assert torch.equal(token_ids, candidate_ids)
    features, start = causal_head.features(hidden_states), torch.zeros(1, causal_head.state_size)
    chain = drafter.propose(hidden_states[None], anchor[None], head, embed=embed).token_ids[0]
    of_chain = [start]
    for token_id in torch.cat([anchor, chain]):
        of_chain.append(causal_head.read(causal_head.inputs(token_id[None]), of_chain[-1]))
    chances = {}
    for path in itertools.product(range(5), repeat=3):
        total, previous = 0.0, anchor
        for d, i in enumerate(path):
            state = causal_head.read(
                causal_head.inputs(previous), of_chain[d]
            )  # of the tokens before its parent, it knows the chain's
            rows = causal_head.rows(candidate_ids[d, None], torch.tensor([d]))
            of_position = features[d, None], logits[d, None], rows
            total += (causal_head.scores(*of_position, state) / 0.8).log_softmax(dim=-1)[0, i].item()
            previous = candidate_ids[d, i, None]
            chances[path[: d + 1]] = math.exp(total)
    tree = DraftTree.grown(positions_of(log_probs.tolist(), token_ids.tolist()), 40)
    likeliest = sorted(chances, key=chances.__getitem__, reverse=True)[:40]
    assert paths(tree) == [tuple(int(token_ids[d, i]) for d, i in enumerate(path)) for path in likeliest]
    best = [0]
    while children := [column for (parent, _), column in tree.columns.items() if parent == best[-1]]:
        best.append(min(children))
    assert [tree.token_ids[column - 1] for column in best[1:]] == chain.tolist()[: len(best) - 1]
    assert not torch.equal(
        chain, drafter.compute_logits(hidden_states, head).argmax(dim=-1)
    )  # the head changes something


def test_depths_columns_paths_and_ancestors() -> None:
    tree = DraftTree([7, 8, 9, 7, 5], [0, 1, 0, 2, 4])
    assert tree.depths == [0, 1, 2, 1, 3, 4]
    assert tree.columns == {(0, 7): 1, (1, 8): 2, (0, 9): 3, (2, 7): 4, (4, 5): 5}
    assert tree.paths == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5]]
    assert tree.walk({0: 7, 1: 8, 2: 6}.__getitem__) == [0, 1, 2]
    expected = [{0}, {0, 1}, {0, 1, 2}, {0, 3}, {0, 1, 2, 4}, {0, 1, 2, 4, 5}]
    assert [set(row.nonzero().flatten().tolist()) for row in tree.ancestors()] == expected


@pytest.mark.parametrize("window", [None, 3])
def test_who_sees_whom(window: int | None) -> None:
    """As a double loop over columns and keys has it; keys after the tree are seen by nobody."""
    tree = DraftTree([7, 8, 9, 7, 5], [0, 1, 0, 2, 4])
    depths, starts, num_keys = torch.tensor(tree.depths), torch.tensor([4, 2]), 13
    visible = target_sees(starts[:, None] + depths, num_keys, tree.ancestors(), window)
    for row, start in enumerate(starts.tolist()):
        for column, key in itertools.product(range(6), range(num_keys)):
            if key < start:
                is_seen, position = True, key
            elif key < start + 6:
                is_seen, position = bool(tree.ancestors()[column, key - start]), start + tree.depths[key - start]
            else:
                is_seen, position = False, 0
            if window is not None:
                is_seen = is_seen and start + tree.depths[column] - position < window
            assert visible[row, column, key] == is_seen, (row, column, key)


def test_a_chain_sees_what_causal_rows_see() -> None:
    ancestors, depths = torch.ones(5, 5, dtype=torch.bool).tril(), torch.arange(5)
    distance = torch.arange(6, 11)[:, None] - torch.arange(11)
    for window in (None, 4):
        expected = ((distance >= 0) & (distance < (window or 99)))[None]
        for columns in (ancestors, None):
            assert torch.equal(target_sees(6 + depths[None], 11, columns, window), expected)


def test_kept_columns_move_together() -> None:
    cache = TreeCache(num_layers=2, capacity=16)
    states = torch.arange(9.0).view(1, 1, 9, 1).repeat(1, 2, 1, 4)
    with cache.recording(6):
        for layer in range(2):
            cache.update(states, -states, layer)
    cache.keep_columns([0, 2, 5])  # positions 3 + (0, 2, 5)
    assert cache.lengths == [6]
    keys, values = cache.update(torch.full((1, 2, 1, 4), 50.0), torch.full((1, 2, 1, 4), -50.0), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 5, 8, 50]
    assert torch.equal(values, -keys)


def test_kept_columns_are_checked() -> None:
    """Promise: what is not there cannot be kept."""
    cache = TreeCache(num_layers=1, capacity=16)
    with cache.recording(5):
        cache.update(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), 0)
    with pytest.raises(ValueError, match=r"Cannot roll back \[5\] of \[4\]"):
        cache.keep_columns([])
    with cache.recording(4):
        pass
    cache.keep_columns([])
    assert cache.lengths == [0]


LINEAR = ("qwen3_next", "lfm2", "kimi_linear", "olmo_hybrid")
TREE = DraftTree([7, 8, 9, 7, 5, 4], [0, 1, 0, 2, 4, 3])
CHAIN = DraftTree([7, 8, 9], [0, 1, 2])


def proposed(is_finite: bool = True) -> TreeProposals:
    """The nodes of `TREE`."""
    return TreeProposals(torch.tensor([TREE.token_ids]), is_finite=torch.tensor([is_finite]), tree=TREE)


@pytest.mark.parametrize("columns", [[0], [0, 1, 2, 4, 5], [0, 1, 2], [0, 3, 6], [0, 3]])
@pytest.mark.parametrize("name", ["gemma3", *(name for name in LINEAR if FAMILIES[name].is_served)])
def test_a_tree_gives_the_logits_of_its_paths(name: str, columns: list[int]) -> None:
    """Promise: each column's logits are those after its path, and after a path is kept, the text goes on from it."""
    target, text = FAMILIES[name].make(), make_prompt(11, seed=5)
    own = Target(target, [0])
    cache = TreeCache(own.num_layers, 4, mixers=own.mixers)
    last_ids = torch.tensor([[6, 2]])

    def logits_after(more_ids: torch.Tensor) -> torch.Tensor:
        return target(torch.cat([text, more_ids], dim=1), use_cache=False).logits[:, -more_ids.shape[1] :]

    def assert_close(logits: torch.Tensor, more_ids: torch.Tensor) -> None:
        # Running states and experts enlarge rounding; logits are up to 4.
        torch.testing.assert_close(logits, logits_after(more_ids), rtol=0, atol=3e-3)

    with torch.no_grad():
        own.read(text, cache, [11])
        for tree, kept in ((TREE, columns), (CHAIN, [0, 1]), (CHAIN, [0, 1, 2, 3])):
            token_ids = torch.tensor([[3, *tree.token_ids]])
            logits, _ = verify_tree(own, token_ids, cache, tree)
            for path in tree.paths:
                assert_close(logits[:, path], token_ids[:, path])
            cache.keep_columns(kept)
            text = torch.cat([text, token_ids[:, kept]], dim=1)
            last, _ = own.verify(last_ids, cache)
            assert_close(last, last_ids)
            cache.rollback(2)
    assert cache.lengths == [text.shape[1]]


def choices_for(token_ids: list[int]) -> torch.Tensor:
    """Logits [1, S, V] whose best tokens are these."""
    return 5.0 * torch.nn.functional.one_hot(torch.tensor([token_ids]), 12).float()


def test_the_choices_are_followed_down_the_tree() -> None:
    """Promise: the accepted path is the target's own, its columns are named, and the token after it is the target's."""
    tree = proposed()
    for choices, columns in [
        ([1, 7, 7, 7, 7, 7, 7], [0]),
        ([7, 8, 7, 1, 5, 2, 1], [0, 1, 2, 4, 5]),
        ([9, 8, 7, 4, 5, 2, 1], [0, 3, 6]),
        ([7, 9, 7, 4, 5, 2, 1], [0, 1]),
    ]:
        acceptance = tree.accept_match(torch.tensor([choices]), torch.zeros(1, 7))
        assert acceptance.columns == columns
        assert acceptance.num_accepted.tolist() == [len(columns) - 1]
        assert acceptance.token_ids.tolist() == [[choices[column] for column in columns]]
        assert acceptance.anchors.tolist() == [[choices[columns[-1]]]]


def test_broken_logits_on_the_path_are_reported() -> None:
    """Promise: of the target on the accepted path alone, and of the drafter."""
    choices, best = torch.tensor([[9, 8, 7, 4, 5, 2, 1]]), torch.zeros(1, 7)
    best[0, 1] = torch.nan
    proposals = proposed()
    assert proposals.accept_match(choices, best).num_accepted.tolist() == [2]
    best[0, 6] = torch.inf
    assert proposals.accept_match(choices, best).num_accepted.tolist() == [TARGET_BROKE]
    broken = proposed(is_finite=False)
    assert broken.accept_match(choices, torch.zeros(1, 7)).num_accepted.tolist() == [DRAFTER_BROKE]


def test_a_smaller_tree_is_the_first_nodes_of_a_larger_one() -> None:
    log_probs, token_ids = random_distributions(depth=3, width=4, seed=1)
    positions = positions_of(log_probs, token_ids)
    tree = DraftTree.grown(positions, 12)
    for count in range(12):
        first = DraftTree.grown(positions, count)
        assert (first.token_ids, first.parents) == (tree.token_ids[:count], tree.parents[:count])
    empty = DraftTree.grown(positions, 0)
    assert (empty.ancestors().tolist(), empty.depths) == ([[True]], [0])


def test_processors_follow_the_path_that_the_target_takes() -> None:
    """Promise: called once for each token that is committed, in order; scores are those of the path."""
    texts: list[list[int]] = []

    def noted(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        texts.append(input_ids[0].tolist())
        return scores - torch.nn.functional.one_hot(input_ids[:, -1], 12) * 100.0  # no token twice in a row

    request = request_of(keeping={"scores"})
    acceptor = TreeAcceptor(request, [LogitsProcessorList([noted])], lambda text_ids: False)
    logits = choices_for([9, 8, 7, 4, 5, 2, 1])
    tree = proposed()
    acceptance = acceptor.accept(logits, [TextSequence(0, torch.tensor([1, 2]))], tree)
    assert isinstance(acceptance, TreeAcceptance)
    assert acceptance.columns == [0, 3, 6]
    assert texts == [[1, 2], [1, 2, 9], [1, 2, 9, 4]]
    assert acceptance.scores is not None
    assert acceptance.scores.argmin(dim=-1).tolist() == [[2, 9, 4]]
    texts.clear()
    chain = acceptor.accept(logits[:, :3], [TextSequence(0, torch.tensor([1, 2]))], Proposals(torch.tensor([[9, 8]])))
    assert chain.num_accepted.tolist() == [2]  # a chain is accepted as ever
    assert texts == [[1, 2], [1, 2, 9], [1, 2, 9, 8]]


def test_a_sampled_choice_has_the_uniform_of_its_depth() -> None:
    """Promise: columns of equal depth draw with the number of one position, so a tree writes the text of a chain."""
    torch.manual_seed(4)
    of_depth = torch.randn(5, 12)
    trees = proposed()
    acceptor = TreeAcceptor(request_of(do_sample=True), [LogitsProcessorList()], lambda text_ids: False)
    sequence = TextSequence(0, torch.tensor([1, 2]), [4])
    choices = acceptor.choose(of_depth[TREE.depths][None], [sequence], TREE.depths)[0][0].tolist()
    expected = acceptor.choose(of_depth[None], [sequence], range(5))[0][0].tolist()
    assert choices == [expected[depth] for depth in TREE.depths]
    assert trees.tree.depths == TREE.depths


def forked(target: PreTrainedModel, prompt: torch.Tensor, **overrides: Any) -> tuple[ForkingDrafter, torch.Tensor]:
    """A drafter whose second best is right where its best is wrong, and the text with a block to spare."""
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS + BLOCK_SIZE, eos_token_id=None)
    return ForkingDrafter(target, truth, SCRIPT, **overrides), truth[:, : prompt.shape[1] + NEW_TOKENS]


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_a_tree_goes_on_where_a_chain_falls(kind: str) -> None:
    target, prompt = make_target(kind), make_prompt(17, seed=3)
    drafter, truth = forked(target, prompt)
    chain = spec_generate(drafter, target, prompt, **GREEDY)
    tree = spec_generate(drafter, target, prompt, draft_tree=2 * BLOCK_SIZE, **GREEDY)
    assert torch.equal(chain.sequences, truth)
    assert torch.equal(tree.sequences, truth)
    assert chain.acceptance_lengths == [expected_lengths(SCRIPT, NEW_TOKENS)]
    assert tree.acceptance_lengths == [expected_lengths([BLOCK_SIZE - 1], NEW_TOKENS)]


@pytest.mark.parametrize("name", [name for name in MASKED if name in FAMILIES and FAMILIES[name].is_served])
def test_families_with_masks_of_their_own(name: str) -> None:
    """Promise: exact also past a window, which here cuts through the tree."""
    target, prompt = FAMILIES[name].make(), make_prompt(23, seed=10)
    drafter, truth = forked(target, prompt)
    output = spec_generate(drafter, target, prompt, draft_tree=2 * BLOCK_SIZE, **GREEDY)
    assert torch.equal(output.sequences, truth)
    assert output.acceptance_lengths == [expected_lengths([BLOCK_SIZE - 1], NEW_TOKENS)]


def test_eager_attention_gets_a_mask_it_adds() -> None:
    target, prompt = make_target(), make_prompt(17, seed=3)
    target.set_attn_implementation("eager")
    drafter, truth = forked(target, prompt)
    assert torch.equal(spec_generate(drafter, target, prompt, draft_tree=12, **GREEDY).sequences, truth)


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20}])
@pytest.mark.parametrize("head_name", DRAFTERS)
@pytest.mark.parametrize("nodes", [3, 24, True])
def test_a_causal_heads_tree_is_exact(asked: dict[str, Any], nodes: int | bool, head_name: str) -> None:
    target, prompt = make_target(num_hidden_layers=2), make_prompt(17, seed=3)
    drafter = deciding_drafter(head_name, **SMALL)
    texts = [
        spec_generate(
            drafter, target, prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=[], draft_tree=tree,
            generator=torch.Generator().manual_seed(5), verification="match" if asked["temperature"] else "auto", **asked,
        )
        for tree in (False, nodes)
    ]  # fmt: skip
    assert torch.equal(*texts)
    if not asked["temperature"]:
        assert torch.equal(texts[0], greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None))


@pytest.mark.parametrize("processing", [{}, {"top_k": 20}, {"repetition_penalty": 1.3}])
def test_sampled_text_is_the_one_of_a_chain(processing: dict[str, Any]) -> None:
    """Promise: noise belongs to positions, so the same seed writes the same text along a tree."""
    target, prompt = make_target(num_hidden_layers=2), make_prompt(17, seed=3)

    def sampled(drafter: Any, seed: int, nodes: int | bool) -> Any:
        return spec_generate(
            drafter, target, prompt, temperature=0.8, max_new_tokens=NEW_TOKENS, stop_token_ids=[], draft_tree=nodes,
            generator=torch.Generator().manual_seed(seed), return_dict_in_generate=True, **processing,
        )  # fmt: skip

    for seed in range(3):
        chain = sampled(make_drafter(**SMALL), seed, nodes=False).sequences
        drafter = ForkingDrafter(target, torch.cat([chain, make_prompt(BLOCK_SIZE)], dim=1), SCRIPT, **SMALL)
        for nodes in (4, 12):
            tree = sampled(drafter, seed, nodes)
            assert torch.equal(tree.sequences, chain)
            assert tree.tau > 2.5, "too little is accepted to show anything"


def test_processors_scores_and_logits_are_those_of_generate() -> None:
    target, prompt = make_target(), make_prompt(17, seed=3)
    asked: dict[str, Any] = {
        "max_new_tokens": 20,
        "repetition_penalty": 1.4,
        "output_scores": True,
        "output_logits": True,
    }
    plain = target.generate(prompt, do_sample=False, eos_token_id=None, return_dict_in_generate=True, **asked)
    drafter = ForkingDrafter(target, torch.cat([plain.sequences, make_prompt(8)], dim=1), SCRIPT)
    ours = spec_generate(
        drafter,
        target,
        prompt,
        temperature=0.0,
        stop_token_ids=[],
        draft_tree=12,
        return_dict_in_generate=True,
        **asked,
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.tau > 3
    for name in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(getattr(ours, name)), torch.stack(getattr(plain, name)), rtol=0, atol=1e-4
        )


def test_a_conversation_holds_the_path_that_stands() -> None:
    target, prompt = make_target(), make_prompt(17, seed=3)
    drafter, truth = forked(target, prompt)
    conversation = Conversation()
    spec_generate(drafter, target, prompt, draft_tree=12, conversation=conversation, **GREEDY)
    longer = torch.cat([truth, make_prompt(5, seed=8)], dim=1)
    held, fresh = (
        spec_generate(make_drafter(), target, longer, conversation=memory, **GREEDY).sequences
        for memory in (None, Conversation())
    )
    assert torch.equal(held, fresh)
    drafter, expected = forked(target, longer)
    conversation._models = (target, drafter)  # the same caches, another script
    again = spec_generate(drafter, target, longer, draft_tree=12, conversation=conversation, **GREEDY)
    assert torch.equal(again.sequences, expected)
    assert conversation.num_reused >= truth.shape[1] - 1


def test_a_stop_inside_a_path_ends_the_text() -> None:
    target, prompt = make_target(), make_prompt(17, seed=3)
    drafter, truth = forked(target, prompt)
    stop = int(truth[0, 17 + 9])
    plain = target.generate(
        prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=stop, pad_token_id=PAD_TOKEN_ID
    )
    ours = spec_generate(drafter, target, prompt, draft_tree=12, **{**GREEDY, "stop_token_ids": [stop]})
    assert torch.equal(ours.sequences, plain)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"draft_tree": -1}, "draft_tree=-1"),
        ({"draft_tree": 2.5}, "draft_tree=2.5"),
        ({"draft_tree": 8, "temperature": 1.0, "verification": "block"}, "verified by the target's own choices"),
    ],
)
def test_what_a_tree_cannot_be(asked: dict[str, Any], message: str) -> None:
    target = make_target()
    with pytest.raises(ValueError, match=message):
        spec_generate(make_drafter(), target, make_prompt(9), **{"temperature": 0.0, "max_new_tokens": 4, **asked})


def test_pairs_that_cannot_take_a_tree_are_refused_by_name() -> None:
    target, drafter, prompt = make_target(), make_drafter(), make_prompt(9)
    with pytest.raises(ValueError, match="one prompt at a time, not 2"):
        spec_generate(drafter, target, prompt.repeat(2, 1), draft_tree=8, temperature=0.0, max_new_tokens=4)
    target.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="takes no 4-D mask"):
        spec_generate(drafter, target, prompt, draft_tree=8, temperature=0.0, max_new_tokens=4)
