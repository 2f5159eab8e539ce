"""Draft trees: the likeliest paths, one forward, and a text that is the target's own whatever was proposed."""

from __future__ import annotations

import itertools
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
    BatchScriptedDrafter,
    ForkingDrafter,
    expected_lengths,
    greedy,
    left_padded,
    make_drafter,
    make_prompt,
    make_target,
    request_of,
    scripted,
    small_target,
)
from transformers import LogitsProcessorList, PreTrainedModel

from dflash import Conversation, spec_generate
from dflash.engine.trees import (
    Branches,
    HeadBranches,
    TreeAcceptance,
    TreeAcceptor,
    TreeCache,
    TreeProposals,
    TreeProposer,
    grown,
)
from dflash.model.acceptance_dflash import DRAFTER_BROKE, TARGET_BROKE, Proposals
from dflash.model.attention_dflash import target_sees
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import Target


NEW_TOKENS = 30
TEMPERATURE = 0.8
SCRIPT = [2, 0, BLOCK_SIZE - 1, 1, 3]
GREEDY = {**tiny_models.GREEDY, "max_new_tokens": NEW_TOKENS, "prompt_lookup_num_tokens": 0}
# Families whose masks differ: one window on all layers, windows on some of them, none; grouped experts, latent keys.
MASKED = ("gemma3", "gemma4", "gemma4_shared_kv", "gpt_oss", "mistral", "cohere2", "deepseek_v3", "qwen3_moe", "phi3")


def trees_of(
    head: Any, states: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, budget: int
) -> TreeProposals:
    states, logits = states[:, :budget], logits[:, :budget]
    branches = Branches(logits, TEMPERATURE, states.device)
    if head is not None:
        branches = HeadBranches(head, states, logits, anchors, TEMPERATURE)
    return grown(branches, anchors, budget)


def tokens_of(proposals: TreeProposals, place: int) -> list[tuple[int, ...]]:
    """The tokens on the way to each node of a sequence's tree."""
    found: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(proposals.token_ids[place].tolist(), proposals.parents[place].tolist(), strict=True):
        found.append((*found[parent], token_id))
    return found[1:]


def log_chances(
    head: Any, hidden_states: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor
) -> dict[tuple[int, ...], float]:
    """The log-probability of every path through a block's candidates, path by path: the oracle. One sequence."""
    chances: dict[tuple[int, ...], float] = {}
    if head is None:
        best = (logits[0] / TEMPERATURE).log_softmax(dim=-1).topk(min(8, logits.shape[-1]))
        for depth in range(1, logits.shape[1] + 1):
            for path in itertools.product(range(best.values.shape[1]), repeat=depth):
                tokens = tuple(int(best.indices[place, rank]) for place, rank in enumerate(path))
                chances[tokens] = sum(float(best.values[place, rank]) for place, rank in enumerate(path))
        return chances
    candidate_ids = logits.topk(head.top_k, dim=-1).indices[0]  # [R, K]
    features = head.features(hidden_states)[0]
    paths: list[Any] = [((), 0.0, anchor, torch.zeros(1, head.state_size))]
    for position, ids in enumerate(candidate_ids):
        rows = head.rows(ids[None], torch.tensor([position]))
        longer = []
        for path, total, previous, before in paths:
            state = head.read(head.inputs(previous), before)
            scores = head.scores(features[position, None], logits[0, position, None, ids], rows, state)
            log_probs = head.probabilities(scores, TEMPERATURE)[0].log().tolist()
            for token_id, log_prob in zip(ids.tolist(), log_probs, strict=True):
                extended = ((*path, token_id), total + log_prob, torch.tensor([token_id]), state)
                longer.append(extended)
                chances[extended[0]] = extended[1]
        paths = longer
    return chances


def likeliest(chances: dict[tuple[int, ...], float], budget: int) -> list[tuple[int, ...]]:
    return sorted(chances, key=chances.__getitem__, reverse=True)[:budget]


@pytest.mark.parametrize("budget", [1, 2, 5, 17, 60])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_the_likeliest_paths(budget: int, seed: int) -> None:
    """Promise: without a head, of the drafter's probabilities among all tokens."""
    torch.manual_seed(seed)
    log_probs = torch.randn(2, 3, 10).log_softmax(dim=-1)
    anchors = torch.tensor([[1], [2]])
    trees = trees_of(None, torch.zeros(2, 3, 4), log_probs, anchors, budget)
    for place in range(2):
        chances = log_chances(None, torch.zeros(1, 3, 4), log_probs[place, None], anchors[place])
        assert tokens_of(trees, place) == likeliest(chances, budget)


def test_a_tree_ends_where_there_are_no_more_paths() -> None:
    log_probs = torch.randn(1, 2, 3).log_softmax(dim=-1)
    anchor = torch.tensor([[1]])
    trees = trees_of(None, torch.zeros(1, 2, 4), log_probs, anchor, 100)
    assert sorted(tokens_of(trees, 0)) == sorted(log_chances(None, torch.zeros(1, 2, 4), log_probs, anchor[0]))
    assert trees.token_ids.shape == (1, 3 + 9)


def test_what_is_certain_comes_after_what_it_follows() -> None:
    """Promise: a path that is as probable as a shorter one is longer by certain tokens, and nodes come after their parents."""
    logits = torch.zeros(1, 15, 40)
    logits[..., 3] = 1e4
    trees = trees_of(None, torch.zeros(1, 15, 4), logits, torch.tensor([[1]]), 60)
    assert tokens_of(trees, 0)[:15] == [(3,) * depth for depth in range(1, 16)]
    assert bool((trees.parents <= torch.arange(60)).all())


def test_tokens_outside_the_drafters_vocabulary_come_last() -> None:
    """Promise: they take only room that nothing else needs, and the tree stays one."""
    log_probs = torch.tensor([[[-0.1, -2.4, -torch.inf]] * 2])
    trees = trees_of(None, torch.zeros(1, 2, 4), log_probs, torch.tensor([[1]]), 12)
    assert tokens_of(trees, 0)[:6] == [(0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1)]
    assert len(set(tokens_of(trees, 0))) == 12
    assert trees.is_finite is not None
    assert trees.is_finite.tolist() == [True]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_drafter_whose_logits_are_not_finite_is_reported(broken: float) -> None:
    """Promise: of its own sequence alone, also at the last position, and the step can be run."""
    logits = torch.randn(2, 4, 10)
    logits[1, 3, 2] = broken
    trees = trees_of(None, torch.zeros(2, 4, 4), logits.log_softmax(dim=-1), torch.tensor([[1], [2]]), 30)
    assert trees.is_finite is not None
    assert trees.is_finite.tolist() == [True, False]
    assert trees.depths.shape == (2, 31)
    acceptance = trees.accept_match(torch.zeros(2, 31, dtype=torch.long), torch.zeros(2, 31))
    assert acceptance.num_accepted[1] == DRAFTER_BROKE
    assert acceptance.num_accepted[0] >= 0


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
@pytest.mark.parametrize("budget", [2, 40])
def test_a_causal_heads_tree_is_the_likeliest_paths_of_its_own_states(budget: int, head_name: str) -> None:
    """Promise: each node is scored in the state that its own path leaves, and the chain is the one that `propose` takes.

    The path that the head alone takes has another state: a tree scored by it would be another one.
    """
    target, drafter = make_target(), deciding_drafter(head_name)
    embed = target.get_input_embeddings()
    causal_head = drafter.causal_head(embed)
    causal_head.top_k = 5
    drafter.causal_head = lambda _: causal_head
    torch.manual_seed(0)
    hidden_states, anchors = torch.randn(2, 3, drafter.config.hidden_size), torch.tensor([[7], [30]])
    head = target.get_output_embeddings()
    logits = drafter.compute_logits(hidden_states, head)
    trees = trees_of(causal_head, hidden_states, logits, anchors, budget)
    chains = drafter.propose(hidden_states, anchors, head, embed=embed).token_ids.tolist()
    for place, chain in enumerate(chains):
        chances = log_chances(causal_head, hidden_states[place, None], logits[place, None], anchors[place])
        assert tokens_of(trees, place) == likeliest(chances, budget)
        best: tuple[int, ...] = ()
        while longer := [path for path in tokens_of(trees, place) if path[:-1] == best]:
            best = longer[0]
        assert list(best) == chain[: len(best)]
    assert chains != logits.argmax(dim=-1).tolist()  # the head changes something


def test_a_tree_goes_as_deep_as_it_has_nodes() -> None:
    """Promise: positions that no node can reach are not drafted for."""
    depths: list[int] = []

    def hidden_states(anchors: torch.Tensor, depth: int) -> torch.Tensor:
        depths.append(depth)
        return torch.zeros(1, depth, 9)

    no_head = SimpleNamespace(compute_logits=lambda states, head: states, causal_head=lambda embed: None)
    request = SimpleNamespace(max_draft_tokens=None, temperature=1.0)
    drafts: Any = SimpleNamespace(
        drafter=no_head,
        request=request,
        target=SimpleNamespace(head=None),
        embed=None,
        hidden_states=hidden_states,
        num_proposals=5,
    )
    for most, num_nodes in ((9, 3), (2, 24), (9, 24)):
        proposals = TreeProposer(drafts, num_nodes).propose([], torch.tensor([[1]]), most)
        assert proposals.token_ids.shape == (1, min(most, num_nodes))
    assert depths == [3, 2, 5]
    assert TreeProposer(drafts, 3).propose([], torch.tensor([[1]]), 0).token_ids.shape == (1, 0)


def trees_with(token_ids: list[list[int]], parents: list[list[int]], **fields: Any) -> TreeProposals:
    return TreeProposals(torch.tensor(token_ids), parents=torch.tensor(parents), **fields)


def paths_of(trees: TreeProposals, place: int = 0) -> list[list[int]]:
    """The columns from the anchor to each column."""
    return [row.nonzero().flatten().tolist() for row in trees.ancestors[place]]


def test_depths_and_ancestors() -> None:
    trees = trees_with([[7, 8, 9, 7, 5], [7, 8, 9, 3, 5]], [[0, 1, 0, 2, 4], [0, 0, 0, 3, 3]])
    assert trees.depths.tolist() == [[0, 1, 2, 1, 3, 4], [0, 1, 1, 1, 2, 2]]
    assert trees.walk(0, {0: 7, 1: 8, 2: 6}.__getitem__) == [0, 1, 2]
    assert trees.walk(1, {0: 9, 3: 5, 5: 7}.__getitem__) == [0, 3, 5]
    assert paths_of(trees, 0) == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5]]
    assert paths_of(trees, 1) == [[0], [0, 1], [0, 2], [0, 3], [0, 3, 4], [0, 3, 5]]


@pytest.mark.parametrize("window", [None, 3])
def test_who_sees_whom(window: int | None) -> None:
    """As a double loop over columns and keys has it; keys after the tree are seen by nobody."""
    trees = trees_with([[7, 8, 9, 7, 5], [7, 8, 9, 3, 5]], [[0, 1, 0, 2, 4], [0, 0, 0, 3, 3]])
    starts, num_keys = torch.tensor([4, 2]), 13
    visible = target_sees(starts[:, None] + trees.depths, num_keys, trees.ancestors, window)
    for row, start in enumerate(starts.tolist()):
        depths, ancestors = trees.depths[row].tolist(), trees.ancestors[row]
        for column, key in itertools.product(range(6), range(num_keys)):
            if key < start:
                is_seen, position = True, key
            elif key < start + 6:
                is_seen, position = bool(ancestors[column, key - start]), start + depths[key - start]
            else:
                is_seen, position = False, 0
            if window is not None:
                is_seen = is_seen and start + depths[column] - position < window
            assert visible[row, column, key] == is_seen, (row, column, key)


def test_a_chain_sees_what_causal_rows_see() -> None:
    ancestors, depths = torch.ones(1, 5, 5, dtype=torch.bool).tril(), torch.arange(5)
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
    cache.bring_to_front(torch.tensor([[0, 2, 5, 0, 0, 0]]))  # positions 3 + (0, 2, 5)
    cache.rollback([3])
    assert cache.lengths == [6]
    keys, values = cache.update(torch.full((1, 2, 1, 4), 50.0), torch.full((1, 2, 1, 4), -50.0), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 5, 8, 50]
    assert torch.equal(values, -keys)


def test_kept_columns_move_together_in_each_sequence() -> None:
    """Promise: in sequences of different lengths, each by its own path."""
    cache = TreeCache(num_layers=1, capacity=16, batch_size=2)
    text = torch.arange(4.0).view(1, 1, 4, 1).repeat(2, 2, 1, 4)
    with cache.appending(None, [4, 2]):
        cache.update(text, text, 0)
    states = torch.arange(10.0, 14.0).view(1, 1, 4, 1).repeat(2, 2, 1, 4)
    slots = torch.tensor([[4, 5, 6, 7], [2, 3, 4, 5]])
    with cache.recording(4), cache.appending(slots, [4, 4]):
        cache.update(states, -states, 0)
    cache.bring_to_front(torch.tensor([[0, 3, 0, 0], [0, 2, 3, 0]]))
    cache.rollback([2, 1])
    assert cache.lengths == [6, 5]
    [keys], _ = cache.storage(16)
    assert keys[0, 0, :6, 0].tolist() == [0, 1, 2, 3, 10, 13]
    assert keys[1, 0, :5, 0].tolist() == [0, 1, 10, 12, 13]


LINEAR = ("qwen3_next", "lfm2", "kimi_linear", "olmo_hybrid")


def proposed(is_finite: bool = True) -> TreeProposals:
    """A tree of six nodes."""
    return trees_with([[7, 8, 9, 7, 5, 4]], [[0, 1, 0, 2, 4, 3]], is_finite=torch.tensor([is_finite]))


@pytest.mark.parametrize("columns", [[0], [0, 1, 2, 4, 5], [0, 3, 6]])
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
        chain = trees_with([[7, 8, 9]], [[0, 1, 2]])
        for tree, kept in ((proposed(), columns), (chain, [0, 1]), (chain, [0, 1, 2, 3])):
            token_ids = torch.cat([torch.tensor([[3]]), tree.token_ids], dim=1)
            with cache.recording(token_ids.shape[1], tree.ancestors):
                logits, _ = own.verify_columns(token_ids, cache, tree.depths, tree.ancestors)
            for path in paths_of(tree):
                assert_close(logits[:, path], token_ids[:, path])
            width, count = token_ids.shape[1], len(kept)
            cache.bring_to_front(torch.tensor([[*kept, *[0] * (width - count)]]))
            cache.rollback(width - count)
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
    padding = [0] * 7
    for choices, columns in [
        ([1, 7, 7, 7, 7, 7, 7], [0]),
        ([7, 8, 7, 1, 5, 2, 1], [0, 1, 2, 4, 5]),
        ([9, 8, 7, 4, 5, 2, 1], [0, 3, 6]),
        ([7, 9, 7, 4, 5, 2, 1], [0, 1]),
    ]:
        acceptance = tree.accept_match(torch.tensor([choices]), torch.zeros(1, 7))
        count = len(columns)
        assert acceptance.columns.tolist() == [[*columns, *padding[count:]]]
        assert acceptance.num_accepted.tolist() == [count - 1]
        assert acceptance.token_ids[0, :count].tolist() == [choices[column] for column in columns]
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
    torch.manual_seed(1)
    log_probs, anchor = torch.randn(1, 3, 10).log_softmax(dim=-1), torch.tensor([[1]])
    tree = tokens_of(trees_of(None, torch.zeros(1, 3, 4), log_probs, anchor, 12), 0)
    for count in range(1, 12):
        first = trees_of(None, torch.zeros(1, 3, 4), log_probs, anchor, count)
        assert tokens_of(first, 0) == tree[:count]


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
    assert acceptance.columns.tolist() == [[0, 3, 6, 0, 0, 0, 0]]
    assert texts == [[1, 2], [1, 2, 9], [1, 2, 9, 4]]
    assert acceptance.scores is not None
    assert acceptance.scores[:, :3].argmin(dim=-1).tolist() == [[2, 9, 4]]
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
    depths = trees.depths[0].tolist()
    choices = acceptor.choose(of_depth[trees.depths], [sequence], trees.depths)[0][0].tolist()
    expected = acceptor.choose(of_depth[None], [sequence], range(5))[0][0].tolist()
    assert choices == [expected[depth] for depth in depths]


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


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [({"temperature": 0.0}, 3), ({"temperature": 0.0}, True), ({"temperature": 0.8, "top_k": 20}, 24)],
)
@pytest.mark.parametrize("head_name", DRAFTERS)
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


BATCH = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 20, "verification": "match"},
    "processed": {"temperature": 0.8, "repetition_penalty": 1.3, "verification": "match"},
    "looked up": {"temperature": 0.0, "prompt_lookup_num_tokens": 9, "max_matching_ngram_size": 1},
    "adaptive": {"temperature": 0.0, "adaptive": True},
}


@pytest.mark.parametrize("asked", BATCH.values(), ids=BATCH)
@pytest.mark.parametrize("drafter_name", ["no head", "Domino"])
def test_each_text_of_a_batch_follows_a_tree_of_its_own(asked: dict[str, Any], drafter_name: str) -> None:
    """Promise: texts of different lengths are those of chains, and as many proposals are accepted as for each text alone."""
    target = small_target("qwen3_sliding")
    prompts = [make_prompt(length, seed=length) for length in (9, 17, 4)]
    input_ids, attention_mask = left_padded(prompts)
    options: dict[str, Any] = {"max_new_tokens": 24, "prompt_lookup_num_tokens": 0, **asked}
    options |= {"stop_token_ids": [], "return_dict_in_generate": True}

    def written(drafter: Any, input_ids: torch.Tensor, seeds: list[int], **more: Any) -> Any:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return spec_generate(drafter, target, input_ids, generator=generators, **more, **options)

    chains = written(make_drafter(**SMALL), input_ids, [0, 1, 2], attention_mask=attention_mask)
    new_ids = chains.sequences[:, input_ids.shape[1] :]
    spare = make_prompt(BLOCK_SIZE)
    truths = [torch.cat([prompt, own[None], spare], dim=1) for prompt, own in zip(prompts, new_ids, strict=True)]
    if drafter_name == "Domino":
        drafter: Any = deciding_drafter("Domino", **SMALL)
    else:
        drafter = BatchScriptedDrafter(target, truths, **SMALL)
    trees = written(drafter, input_ids, [0, 1, 2], attention_mask=attention_mask, draft_tree=14)
    assert torch.equal(trees.sequences, chains.sequences)
    if asked.keys() <= {"temperature", "top_k", "verification"}:  # a penalty counts the padding
        alone = [written(drafter, prompt, [place], draft_tree=14) for place, prompt in enumerate(prompts)]
        assert trees.acceptance_lengths == [output.acceptance_lengths[0] for output in alone]
        if drafter_name == "no head":
            assert trees.tau > 2, "too little is accepted to show anything"


def test_texts_of_a_batch_stop_one_by_one() -> None:
    """Promise: also inside a path, and the others go on in their own caches."""
    target = small_target("qwen3")
    prompts = [make_prompt(length, seed=length) for length in (9, 17, 4)]
    input_ids, attention_mask = left_padded(prompts)
    drafter = scripted(target, prompts, **SMALL)
    stop = int(greedy(target, prompts[1], max_new_tokens=8)[0, -1])
    asked = {"max_new_tokens": 20, "attention_mask": attention_mask}
    plain = target.generate(input_ids, do_sample=False, eos_token_id=stop, pad_token_id=PAD_TOKEN_ID, **asked)
    ours = spec_generate(
        drafter, target, input_ids, temperature=0.0, stop_token_ids=[stop], draft_tree=12, pad_token_id=PAD_TOKEN_ID, **asked
    )  # fmt: skip
    assert torch.equal(ours, plain)


def test_pairs_that_cannot_take_a_tree_are_refused_by_name() -> None:
    target, drafter, prompt = make_target(), make_drafter(), make_prompt(9)
    target.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="takes no 4-D mask"):
        spec_generate(drafter, target, prompt, draft_tree=8, temperature=0.0, max_new_tokens=4)


def test_the_drafter_reads_the_path_that_stands() -> None:
    """Promise: its context after trees is that of chains, so that later drafts are as good."""
    target, prompt = make_target(), make_prompt(17, seed=3)
    of_tree, of_chain = Conversation(), Conversation()
    keys = []
    for conversation, num_nodes in ((of_tree, 2 * BLOCK_SIZE), (of_chain, 0)):
        drafter, _ = forked(target, prompt)
        spec_generate(drafter, target, prompt, draft_tree=num_nodes, conversation=conversation, **GREEDY)
        conversation.context.absorb()
        assert conversation.context.num_read == len(conversation.token_ids)
        of_layers, _ = conversation.context.cache.storage(0)
        keys.append(torch.stack([layer[0, :, : conversation.context.num_read] for layer in of_layers]))
    assert of_tree.token_ids == of_chain.token_ids
    torch.testing.assert_close(*keys, rtol=0, atol=2e-5)
