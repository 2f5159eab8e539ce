"""Whether a head that chooses token by token keeps what the loop, the trees and the training expect of it.

Everything runs on tiny random models on the CPU, in a few seconds. A fault is a sentence; what is counted needs no clock.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dflash.drafter import DFlashConfig, DFlashDraftModel
from dflash.model.acceptance_dflash import RULES
from dflash.model.heads_dflash import CausalHead


MOST_OPERATIONS = 30  # of a position; Domino's head takes 14
TOLERANCE = 1e-4  # of float32 numbers that are computed in two ways
TEMPERATURES = (0.5, 1.0, 1.4)
SMALL_VOCABULARY, LARGE_VOCABULARY = 5, 499  # 499 is a prime number, so no other size is a multiple of it
NUM_TEXTS = 3000  # sampled, to compare their distribution
LEAST_P_VALUE = 1e-4  # of such a comparison
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # large, so that every token depends much on those before it
}


@dataclass(frozen=True)
class HeadReport:
    """What `check_head` found."""

    faults: list[str]
    operations: float  # that the choice of one more position takes
    num_weights: int  # of the head, at the sizes that it was checked with


def check_head(head: type[CausalHead], **fields: Any) -> HeadReport:
    """Checks a head: its probabilities, paths, texts alone, sampled, in trees and in batches, its files, gradients and cost.

    Args:
        head: The class.
        fields: Of the config, which the head reads; small sizes are enough.

    Example:
        >>> check_head(SelectorHead, selector_rank=4, selector_top_k=3).faults
        []
    """
    trial = _Trial(head, fields)
    faults: list[str] = []
    try:
        for check in (_probabilities, _batches, _paths, _texts, _distribution, _files, _gradients, _cost):
            faults += check(trial)
    except Exception as error:  # of the head: which one is the researcher's to see
        name = check.__name__.strip("_")
        faults.append(f"{name} cannot be checked: {type(error).__name__}: {error}")
    num_weights = sum(weight.numel() for weight in _weights(trial.drafter).values())
    return HeadReport(faults, trial.operations, num_weights)


class _Trial:
    """A target and a drafter with the head, whose weights are large enough to change what is proposed."""

    def __init__(self, head: type[CausalHead], fields: dict[str, Any]) -> None:
        class Drafter(DFlashDraftModel):
            head_class = head
            _auto_class = None  # no code is written beside its weights

        self.drafter_class = Drafter
        self.fields = fields
        self.operations = 0.0
        self.target, self.drafter = self.pair(LARGE_VOCABULARY)

    def pair(self, vocab_size: int) -> tuple[PreTrainedModel, Any]:
        """The models, which have so many tokens."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=vocab_size,
            num_hidden_layers=2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **SHAPE,
        )
        target = Qwen3ForCausalLM(config).eval()
        of_drafter = DFlashConfig(
            vocab_size=vocab_size,
            num_hidden_layers=1,
            num_target_layers=2,
            target_layer_ids=[0],
            block_size=5,
            mask_token_id=vocab_size - 1,
            **SHAPE,
            **self.fields,
        )
        drafter = self.drafter_class(of_drafter).eval()
        for weight in _weights(drafter).values():
            torch.nn.init.normal_(weight, std=0.7)
        return target, drafter

    def head(self) -> CausalHead:
        """The head, bound to the drafter and the target."""
        head: CausalHead | None = self.drafter.causal_head(self.target.get_input_embeddings())
        assert head is not None
        return head

    def block(self, num_sequences: int, num_positions: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random hidden states [B, R, D], their logits [B, R, V] and anchors [B, 1]."""
        generator = torch.Generator().manual_seed(num_positions)
        shape = num_sequences, num_positions, SHAPE["hidden_size"]
        hidden_states = torch.randn(shape, generator=generator)
        anchors = torch.randint(LARGE_VOCABULARY, (num_sequences, 1), generator=generator)
        output_embeddings = self.target.get_output_embeddings()
        with torch.no_grad():  # what is checked begins after them
            logits = self.drafter.compute_logits(hidden_states, output_embeddings)
        return hidden_states, logits, anchors


def _weights(drafter: Any) -> dict[str, torch.nn.Parameter]:
    """Those of a drafter's head, by name."""
    modules = drafter.head_names()
    return {name: weight for name, weight in drafter.named_parameters() if name.split(".")[0] in modules}


@torch.no_grad()
def _probabilities(trial: _Trial) -> Iterator[str]:
    """Those that tokens are drawn by have a sum of 1, are not negative, and belong to the tokens that the path holds."""
    block = trial.block(3)
    for temperature in TEMPERATURES:
        uniforms = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        path = trial.head().choose_path(*block, (temperature, uniforms))
        if path.probabilities is None:
            yield "probabilities: a drawn path has none, and rejection needs them."
            return
        sums = path.probabilities.double().sum(dim=-1).flatten()
        furthest = (sums - 1).abs().argmax()
        worst = sums[furthest]
        if not abs(worst - 1) < TOLERANCE:  # NaN too
            yield f"probabilities: those of a position have a sum of {worst:.4f} at temperature {temperature}, not 1."
        if not bool((path.probabilities >= 0).all()):
            yield f"probabilities: one is {path.probabilities.min():.4f} at temperature {temperature}."
        is_candidate = (path.candidate_ids == path.token_ids[..., None]).any(dim=-1)
        if not bool(is_candidate.all()):
            yield "choose_path: a chosen token is none of its position's candidates."


def _scores_along(
    head: CausalHead,
    hidden_states: torch.Tensor,
    top_logits: torch.Tensor,
    top_ids: torch.Tensor,
    before: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Scores [B, K] of the candidates of each position after the tokens `before` [B, R], as trees and training compute them."""
    num_sequences = len(before)
    of_positions = zip(
        before.unbind(dim=1),
        head.features(hidden_states).unbind(dim=1),
        top_logits.unbind(dim=1),
        top_ids.unbind(dim=1),
        strict=True,
    )
    state = hidden_states.new_zeros(num_sequences, head.state_size)
    for position, (token_ids, features, logits, candidates) in enumerate(of_positions):
        inputs = head.inputs(token_ids)
        state = head.read(inputs, state)
        positions = torch.full((num_sequences,), position)
        rows = head.rows(candidates, positions)
        yield head.scores(features, logits, rows, state)


@torch.no_grad()
def _batches(trial: _Trial) -> Iterator[str]:
    """A text's scores are the same alone and in a batch."""
    block = trial.block(3)
    path = trial.head().choose_path(*block)
    hidden_states, logits, anchors = (part[1:2] for part in block)
    alone = trial.head().choose_path(hidden_states, logits, anchors)
    if not torch.allclose(alone.scores[0], path.scores[1], atol=TOLERANCE):
        yield "scores: those of a text differ alone and in a batch, so a sequence reads another one's."


@torch.no_grad()
def _paths(trial: _Trial) -> Iterator[str]:
    """Scores follow from hidden states, logits and the tokens before alone: read again, token by token."""
    head = trial.head()
    hidden_states, logits, anchors = trial.block(3)
    path = head.choose_path(hidden_states, logits, anchors)
    chosen = path.token_ids[:, :-1]
    before = torch.cat([anchors, chosen], dim=1)
    top_logits = logits.gather(-1, path.candidate_ids)
    again = _scores_along(head, hidden_states, top_logits, path.candidate_ids, before)
    for position, scores in enumerate(again):
        in_block = path.scores[:, position]
        if not torch.allclose(scores, in_block, atol=TOLERANCE):
            yield f"scores: those of position {position} differ when they are computed alone, as trees and training do."
            return


def _texts(trial: _Trial) -> Iterator[str]:
    """Greedy texts are the target's: alone, in a batch, along a tree; sampled ones are the same for a seed."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(LARGE_VOCABULARY - 1, (3, 6), generator=generator)
    target: Any = trial.target
    plain = target.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=12)

    def draft(num_texts: int, **options: Any) -> torch.Tensor:
        return trial.drafter.spec_generate(
            prompts[:num_texts], target=target, max_new_tokens=12, stop_token_ids=[], **options
        )

    greedy = {
        "alone": draft(1, temperature=0.0),
        "in a batch": draft(3, temperature=0.0),
        "along a tree": draft(1, temperature=0.0, draft_tree=12),
    }
    for name, texts in greedy.items():
        if not torch.equal(texts, plain[: len(texts)]):
            yield f"texts: the greedy text {name} is not the target's."
    sampling: dict[str, Any] = {"temperature": 1.2, "verification": "match"}
    chain = draft(1, generator=torch.Generator().manual_seed(3), **sampling)
    tree = draft(1, generator=torch.Generator().manual_seed(3), draft_tree=12, **sampling)
    if not torch.equal(chain, tree):
        yield "texts: a seed's sampled text along a tree is not that along a chain."


def _distribution(trial: _Trial) -> Iterator[str]:
    """Texts that are sampled with drawn proposals have the target's distribution (chi-square)."""
    target, drafter = trial.pair(SMALL_VOCABULARY)
    prompt = torch.tensor([[1, 2]])
    temperature = 1.4
    expected = _expected_counts(target, prompt, temperature)
    for verification in RULES:
        texts = drafter.spec_generate(
            prompt.expand(NUM_TEXTS, -1),
            target=target,
            temperature=temperature,
            top_k=0,
            max_new_tokens=3,
            prompt_lookup_num_tokens=0,  # the head proposes everything
            verification=verification,
            stop_token_ids=[],
            generator=torch.Generator().manual_seed(4),
        )
        drawn = SMALL_VOCABULARY * texts[:, 2] + texts[:, 3]
        counts = torch.bincount(drawn, minlength=len(expected)).double()
        p_value = _p_value(counts, expected)
        if p_value < LEAST_P_VALUE:
            yield f"distribution: with verification={verification!r}, sampled texts have another one (p = {p_value:.0e})."


@torch.no_grad()
def _expected_counts(target: Any, prompt: torch.Tensor, temperature: float) -> torch.Tensor:
    """How many of `NUM_TEXTS` texts begin with each pair of tokens [V * V] after the prompt [1, S], on average."""
    tokens = torch.arange(SMALL_VOCABULARY)
    pairs = torch.cartesian_prod(tokens, tokens)
    prompts = prompt.expand(len(pairs), -1)
    texts = torch.cat([prompts, pairs], dim=1)
    outputs = target(texts)
    logits = outputs.logits[:, -3:-1].double()  # of both tokens
    scaled = logits / temperature
    probabilities = scaled.softmax(dim=-1)
    of_tokens = probabilities.gather(-1, pairs[..., None])
    of_pairs = of_tokens.flatten(1).prod(dim=1)
    return NUM_TEXTS * of_pairs


def _p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The chance of a chi-square at least as large; counts that are expected to be below 5 are left out, as is usual."""
    is_counted = expected >= 5
    wanted = expected[is_counted]
    differences = counts[is_counted] - wanted
    statistic = (differences**2 / wanted).sum()
    freedom = statistic.new_tensor(len(wanted))
    p_value = torch.special.gammaincc(freedom / 2, statistic / 2)
    return p_value.item()


@torch.no_grad()
def _files(trial: _Trial) -> Iterator[str]:
    """A saved drafter is the same one."""
    with tempfile.TemporaryDirectory() as folder:
        trial.drafter.save_pretrained(folder)
        again = trial.drafter_class.from_pretrained(folder)
    block = trial.block(3)
    first = trial.head().choose_path(*block)
    second = again.causal_head(trial.target.get_input_embeddings()).choose_path(*block)
    if not torch.equal(first.scores, second.scores):
        yield "files: a drafter that was saved and loaded gives other scores."


def _loss(trial: _Trial) -> torch.Tensor:
    """A loss of the choice after true tokens, and of the confidence where a head has one."""
    head = trial.head()
    hidden_states, logits, anchors = trial.block(3)
    top = logits.topk(head.top_k)
    best = top.indices[..., 0]
    before = torch.cat([anchors, best[:, :-1]], dim=1)
    loss = torch.zeros(())
    for scores in _scores_along(head, hidden_states, top.values, top.indices, before):
        log_probs = scores.log_softmax(dim=-1)
        of_best = log_probs[:, 0]
        loss = loss - of_best.sum()
    confidences = head.confidences(hidden_states, before)
    if confidences is not None:
        loss = loss + torch.nn.functional.softplus(confidences).sum()
    return loss


def _gradients(trial: _Trial) -> Iterator[str]:
    """Each weight learns from the choice after true tokens, or from the confidence."""
    _loss(trial).backward()
    for name, weight in _weights(trial.drafter).items():
        gradient = weight.grad
        if gradient is None or not gradient.any():
            yield f"gradients: {name} gets none, so it learns nothing."
        elif not gradient.isfinite().all():
            yield f"gradients: that of {name} is not finite."


class _Operations(TorchDispatchMode):
    """Counts operations, and those whose result has a size of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.num_wide = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = function.is_view
        self.count += not is_view
        self.num_wide += not is_view and LARGE_VOCABULARY in getattr(result, "shape", ())
        return result


@torch.no_grad()
def _cost(trial: _Trial) -> Iterator[str]:
    """What one more position takes: few operations, and none over the vocabulary."""
    counts = []
    for num_positions in (4, 8):
        block = trial.block(1, num_positions)
        head = trial.head()
        with _Operations() as operations:
            head.choose_path(*block)
        counts.append((operations.count, operations.num_wide))
    (count, num_wide), (more, more_wide) = counts
    trial.operations = (more - count) / 4
    if trial.operations > MOST_OPERATIONS:
        yield f"cost: a position takes {trial.operations:g} operations, more than {MOST_OPERATIONS}: compute what you can before."
    if more_wide > num_wide:
        yield "cost: a position reads the whole vocabulary: score its candidates alone."
