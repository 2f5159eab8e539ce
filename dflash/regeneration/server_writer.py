"""Gets answers from a target on a server with the OpenAI protocol (vLLM, SGLang, …): token ids in, token ids out."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any, Literal

from transformers import AutoConfig, GenerationConfig

from dflash.common.fingerprints import config_fingerprint
from dflash.common.openai_client import OpenAIClient, quote, with_retries
from dflash.model.targets_dflash import max_positions
from dflash.training import stop_ids

from .target_writer import Answer, AnswerRequest, Sampling


def read_configs(target: str, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Loads the config and the generation config of a target from a folder or the Hub, for a [`ServerWriter`]."""
    config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    try:
        return config, GenerationConfig.from_pretrained(target)
    except OSError:  # without a generation config, the settings are those in the config
        return config, GenerationConfig.from_model_config(config)


class ServerWriter:
    """Answers requests with a target on a server. It has the attributes of a writer that [`regenerate_data`] reads.

    It requests completions of token ids, so the server does not apply a chat template. If a server does not take ids,
    the text of the prompt is sent. If a server does not return the ids of an answer, the answer's text is encoded
    again. That gives the same ids for most texts but not for all, so the answer is marked (`is_encoded`).

    `model` is the name under which the server serves the target (`None`: its only model). `tokenizer`, `config` and
    `generation_config` belong to the target. The stop tokens of `generation_config` end an answer.

    A request is sent again after a failure that may pass, such as a busy server or a broken connection: up to four
    times, after longer and longer pauses, until `stopped` is set. `wait` pauses for the given seconds. By default it is
    `stopped.wait`, which returns as soon as `stopped` is set.

    Raises:
        ValueError: if a text to send does not encode to the ids of its prompt with `tokenizer`, if the server counts
            another number of tokens in it, or if a reply is not a completion. Also the errors of `OpenAIClient`.
    """

    is_concurrent: Literal[True] = True

    def __init__(
        self,
        client: OpenAIClient,
        model: str | None,
        tokenizer: Any,
        config: Any,
        generation_config: Any = None,
        batch_size: int = 64,
        wait: Callable[[float], bool | None] | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.stopped = Event()
        self._wait = wait or self.stopped.wait
        self._tokenizer = tokenizer
        self._client = client
        self._stops = stop_ids(generation_config) or {tokenizer.eos_token_id} - {None}
        self.model = self._client.only_model(model)
        self.positions = max_positions(SimpleNamespace(config=config))  # type: ignore[arg-type]
        self.revision = getattr(config, "_commit_hash", None)
        self.facts = {"served_model": self.model, "config": config_fingerprint(config, generation_config)}

    def __call__(self, requests: Sequence[AnswerRequest], sampling: Sampling) -> list[Answer]:
        """Returns the answer to each request. The requests are sent one after another.

        Several threads may call it at the same time.
        """
        return [self._ask(request, sampling) for request in requests]

    def _ask(self, request: AnswerRequest, sampling: Sampling) -> Answer:
        """Sends a request, again after failures that may pass, and returns the answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            # vLLM and SGLang use the sampling defaults of the target's own config for fields that are left out.
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "seed": request.seed % 2**31,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        send = partial(self._client.json, "POST", "/v1/completions")
        count_prompt = partial(_counted, name="prompt_tokens")
        ask = partial(
            self._client.completion,
            body,
            self._tokenizer,
            send,
            count_prompt,
        )
        spread = request.seed % 1000 / 1000
        reply = with_retries(ask, self._wait, spread)
        where = f"{self._client.url}/v1/completions"
        try:
            choice = reply["choices"][0]
            finish = choice["finish_reason"]
            token_ids = choice.get("token_ids")
            has_ids = isinstance(token_ids, list) and bool(token_ids)
            if not has_ids:
                if not isinstance(choice["text"], str):
                    raise TypeError("There are neither ids nor a text.")
                token_ids = self._tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"The reply of {where} is not a completion ({quote(reply)}): check that it is an OpenAI-compatible "
                "server."
            ) from error
        if finish not in ("stop", "length"):
            raise ValueError(f"{where} ended an answer with {finish!r}: look at the server's log.")
        token_ids = list(token_ids)
        ended = finish == "stop"
        if ended and self._stops and (not token_ids or token_ids[-1] not in self._stops):
            # Most engines leave the stop token out of the text.
            own = self._tokenizer.eos_token_id
            token_ids.append(own if own in self._stops else min(self._stops))
        num_tokens = _counted(reply, "completion_tokens")
        is_other_count = num_tokens not in (None, len(token_ids))
        return Answer(
            token_ids,
            ended,
            is_encoded=not has_ids,
            is_miscounted=not has_ids and is_other_count,
        )


def _counted(reply: Any, name: str) -> Any:
    """Returns the number of tokens that the reply's `usage` gives as `name`. `None` if it does not give one."""
    try:
        return reply["usage"][name]
    except (KeyError, TypeError):
        return None
