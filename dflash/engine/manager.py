"""The manager of many texts: it takes requests while others are written, and gives results as they come.

A request is admitted where another has ended, so that all rows of the batch work.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Full
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from dflash.common.messages import is_out_of_memory
from dflash.model.configuration_dflash import check_values
from dflash.model.decoding_dflash import INITIAL_NEW_TOKENS, Block, Conversation
from dflash.model.generation_dflash import generate_blocks
from dflash.model.requests_dflash import IS_COUNT, IS_COUNT_OR_ZERO, first_of, own_processors
from dflash.model.targets_dflash import InexactError, max_positions

from .batching import Member, RowBatch, read_prompts
from .conversations import Conversations
from .tickets import BatchOutput, Cancelled, ThreadStatus, Ticket, as_prompt


logger = logging.get_logger(__name__)

MOST_ROWS = 16  # of a batch, unless a config says
PROMPT_CHUNK = 1024  # tokens of prompts that are read between two steps
QUEUE_TIMEOUT = 10.0  # seconds that a request waits for its place in a full queue, as in transformers
# Arguments of transformers' methods that mean something for its caches and graphs alone.
WITHOUT_EFFECT = (
    "manual_eviction",
    "persistent_manager",
    "record_timestamps",
    "slice_inputs",
    "warmup",
    "workload_hints",
)
# Settings of this file that go into a generation config where there is one, because transformers wants either.
IN_CONFIG = {"eos_token_id", "max_length", "max_new_tokens", "output_scores", "prefill_chunk_size", "use_cache"}
LIMITS = {
    "max_batch_tokens": (IS_COUNT, "use a number of tokens from 1 on, or leave it out"),
    "max_requests_per_batch": (IS_COUNT, "use a number of requests from 1 on, or leave it out"),
    "max_queue_size": (IS_COUNT_OR_ZERO, "use a number of requests, or 0 for no limit"),
    "num_blocks": (IS_COUNT, "use a number of pages from 1 on, or leave it out"),
}


class BatchManager:
    """Writes the texts of requests that come at any time, with a surface like transformers' `ContinuousBatchingManager`.

    A thread writes them between `start` and `stop`; or `run` does, in the caller's. What is wrong with a request fails that
    request alone: its output has the status FAILED and the `error`.

    Args:
        drafter (`DFlashDraftModel`): A drafter trained for `target`.
        target (`PreTrainedModel`): A decoder-only model.
        generation_config (`GenerationConfig`, *optional*): Of all requests. Default: the target's.
        continuous_batching_config (`ContinuousBatchingConfig`, *optional*): Its `max_requests_per_batch`, `max_batch_tokens`,
            `num_blocks` times `page_size`, `max_queue_size`, `allow_block_sharing`, `seed` and `return_logprobs` are read.
        generator (`torch.Generator`, *optional*): What draws the seed, if the config has none. Default: torch's global one.
        keywords: Keywords of `generate_blocks` for all requests.

    Raises:
        ValueError: for settings that no request can have. `InexactError`: the target's own `generate_batch` can have them.
    """

    warmed_up = True  # nothing has to be

    def __init__(
        self,
        drafter: Any,
        target: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        generator: torch.Generator | None = None,
        **keywords: Any,
    ) -> None:
        self.model = target
        self.drafter = drafter
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config
        self.background_thread_status = ThreadStatus()
        limits = {name: getattr(continuous_batching_config, name, None) for name in LIMITS}
        check_values(limits, LIMITS)
        self._chunk_size = min(PROMPT_CHUNK, limits["max_batch_tokens"] or PROMPT_CHUNK)
        config = generation_config or target.generation_config
        # As in transformers: then a text ends at a stop token, or where the target's positions end.
        has_default = config.max_length in (None, GenerationConfig().max_length)  # transformers 4 has one
        has_length = keywords.get("max_length") is not None or not has_default
        num_new = first_of(keywords.get("max_new_tokens"), config.max_new_tokens)
        self._is_endless = num_new is None and not has_length
        # Its clock begins with a request's row.
        self._has_clock = first_of(keywords.get("max_time"), config.max_time) is not None
        self._settings = self._checked(keywords)
        self._chunk_size = self._settings["prefill_chunk_size"]
        # A request that is checked and not run. Its generator spares torch's global one.
        probe = {"decoder_class": RowBatch, "max_new_tokens": INITIAL_NEW_TOKENS, "generator": torch.Generator()}
        self._batch: Any = self._decoder([self._harmless_id()], max_length=None, **probe)
        self._most_rows = self._rows_allowed(limits["max_requests_per_batch"], limits["max_batch_tokens"])
        self._most_positions = self._positions_allowed(limits["num_blocks"])
        self._conversations = Conversations(self._most_rows)
        # Running states could only go on from a text's very end.
        if getattr(continuous_batching_config, "allow_block_sharing", True) and not self._batch.target.mixers:
            self._batch.conversations = self._conversations
        self._queue_size = limits["max_queue_size"] or 0
        self._seed = getattr(continuous_batching_config, "seed", None)
        if self._seed is None and self._batch.acceptor.uniforms_of is not None:
            device = "cpu" if generator is None else generator.device
            self._seed = int(torch.randint(2**31, (), generator=generator, device=device))

        self._changed = threading.Condition()  # re-entrant
        self._num_requests = 0
        self._waiting: deque[Ticket] = deque()
        self._reading: list[Ticket] = []
        self._reader: Any = None  # `read_prompts` of these
        self._rows: dict[int, Ticket] = {}  # of the batch, by number
        self._tickets: dict[str, Ticket] = {}  # of all requests that have no result yet
        self._results: deque[BatchOutput] = deque()
        self._handlers: dict[str, Callable[[BatchOutput], None]] = {}
        self._thread: threading.Thread | None = None
        self._is_serving = False
        self._is_stopping = False
        self._is_hard_stop = False
        self._num_pauses = 0
        self._pausing_thread: int | None = None
        self._step_lock = threading.Lock()  # held while the models run

    # -- settings

    def _checked(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The settings of all requests."""
        config = self.generation_config or self.model.generation_config
        num_texts = keywords.get("num_return_sequences", config.num_return_sequences) or 1
        if num_texts > 1:
            remedy = "give a prompt as often as you want texts"
            raise InexactError(f"num_return_sequences={num_texts} is not supported in a batch of requests: {remedy}.")
        settings = {name: value for name, value in keywords.items() if name not in WITHOUT_EFFECT}
        settings.setdefault("prefill_chunk_size", config.prefill_chunk_size or self._chunk_size)
        if self.generation_config is not None:
            settings["use_cache"] = True  # servers of transformers say False, because theirs is paged
        if getattr(self.continuous_batching_config, "return_logprobs", False):
            settings["output_scores"] = True
        return settings

    def _harmless_id(self) -> int:
        """A token that does not end a text, for a request that is only checked."""
        config = self.generation_config or self.model.generation_config
        stops = config.eos_token_id
        if stops is None:
            return 0
        stop_ids = torch.as_tensor(stops).flatten().tolist()
        candidates = range(len(stop_ids) + 1)
        return next(token_id for token_id in candidates if token_id not in stop_ids)

    def _decoder(self, prompt_ids: list[int], **keywords: Any) -> Any:
        """The decoder of a request. Raises ValueError for one that cannot be run exactly."""
        settings = {**self._settings, **keywords}
        if "eos_token_id" in keywords:
            settings.pop("stop_token_ids", None)  # another name of it
        for name in ("logits_processor", "stopping_criteria"):
            processors = settings.get(name)
            if isinstance(processors, list | tuple):  # a state is one request's
                settings[name] = own_processors(LogitsProcessorList(processors), 2)[0]
        config = copy.copy(self.generation_config)
        if config is not None:
            for name in IN_CONFIG & set(settings):
                setattr(config, name, settings.pop(name))
            settings["generation_config"] = config
        return generate_blocks(self.drafter, self.model, [prompt_ids], **settings)

    def _rows_allowed(self, most: int | None, most_columns: int | None) -> int:
        """How many rows the batch may have."""
        most = most or MOST_ROWS
        if most_columns is None:
            return most
        width: int = self._batch.most_columns
        if most_columns < width:
            raise ValueError(f"max_batch_tokens={most_columns}: a step of one text has up to {width}, allow as many.")
        return min(most, most_columns // width)

    def _positions_allowed(self, num_blocks: int | None) -> int | None:
        """How many positions the caches of all rows may have; `None`: as many as fit."""
        if num_blocks is None:
            return None
        page_size: int = self.continuous_batching_config.page_size
        return num_blocks * page_size

    # -- requests

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **processors: Any,
    ) -> str:
        """Adds a request and returns its id.

        Args:
            input_ids: The token ids of one prompt.
            request_id: Its id, which no other request without a read result has. Default: a new one.
            max_new_tokens: Default: that of the generation config, or as many as the target has positions for.
            streaming: Whether there is a result after each step, with all tokens so far.
            record_timestamps: Has no effect: an output holds no times.
            eos_token_id: What ends this text. Default: that of the generation config.
            processors: Settings of logits processors for one request, which are refused.

        Raises:
            ValueError: for an id that is in use, for anything that is not one prompt, and after `stop`.
            queue.Full: if the queue holds `max_queue_size` requests, after ten seconds where the manager runs.
        """
        if processors:
            names = ", ".join(processors)
            raise ValueError(f"{names} came for one request: all of a manager share one generation config.")
        prompt_ids = as_prompt(input_ids)
        keywords = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        keywords = {name: value for name, value in keywords.items() if value is not None}
        with self._changed:
            self._wait_for_place()
            if request_id is None:
                request_id = self._next_id()
            elif self._is_in_use(request_id):
                raise ValueError(f"request_id={request_id!r} is in use: give each request its own.")
            output = BatchOutput(request_id, prompt_ids)
            ticket = Ticket(self._num_requests, output, keywords, streaming)
            self._num_requests += 1
            self._tickets[request_id] = ticket
            self._waiting.append(ticket)
            self._changed.notify_all()
        return request_id

    def _is_in_use(self, request_id: str) -> bool:
        return request_id in self._tickets or self._result_of(request_id) is not None

    def _next_id(self) -> str:
        """An id for the next request that is not in use: `req_` and a number."""
        while self._is_in_use(f"req_{self._num_requests}"):
            self._num_requests += 1
        return f"req_{self._num_requests}"

    def _wait_for_place(self) -> None:
        """Waits for a place in the queue."""

        def is_over() -> bool:
            has_place = not self._queue_size or len(self._waiting) < self._queue_size
            return has_place or self._is_stopping

        timeout = QUEUE_TIMEOUT if self.is_running() else 0.0
        has_place = self._changed.wait_for(is_over, timeout)
        if self._is_stopping:
            raise ValueError("The manager was stopped: start it again for further requests.")
        if not has_place:
            raise Full(f"max_queue_size={self._queue_size} requests are waiting: take this one again later.")

    def add_requests(
        self,
        inputs: Sequence[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        **keywords: Any,
    ) -> list[str]:
        """Adds a request for each prompt, as `add_request` does, and returns their ids."""
        return [
            self.add_request(
                input_ids,
                max_new_tokens=max_new_tokens,
                streaming=streaming,
                **keywords,
            )
            for input_ids in inputs
        ]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request with the next step: its output is FAILED, with the tokens so far. One that has ended stays as it is."""
        with self._changed:
            ticket = self._tickets.get(request_id)
            if ticket is not None:
                ticket.is_cancelled = True

    # -- results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> BatchOutput | None:
        """The next result, of this request if an id is given. `None` after `timeout` seconds, or if nothing runs."""

        def is_over() -> bool:
            return self._result_of(request_id) is not None or not self.is_running()

        with self._changed:
            self._changed.wait_for(is_over, timeout)
            result = self._result_of(request_id)
            if result is not None:
                self._results.remove(result)
            return result

    def _result_of(self, request_id: str | None) -> BatchOutput | None:
        results = (result for result in self._results if request_id in (None, result.request_id))
        return next(results, None)

    def __iter__(self) -> Iterator[BatchOutput]:
        """Results as they come, until the manager is stopped."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[BatchOutput]:
        """The results of one request as they come, until it has ended."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[BatchOutput], Any]) -> None:
        """Has the running event loop call `callback` with each result of a request, instead of keeping it."""
        loop = asyncio.get_running_loop()

        def handle(result: BatchOutput) -> None:
            with suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(callback, result)

        with self._changed:
            self._handlers[request_id] = handle
            while (result := self._result_of(request_id)) is not None:  # came before the handler
                self._results.remove(result)
                self._hand_over(result)

    def _deliver(self, ticket: Ticket) -> None:
        """Gives a request's output, as it is now."""
        with self._changed:
            if ticket.output.is_finished():
                del self._tickets[ticket.output.request_id]
            self._hand_over(ticket.output.snapshot())
            self._changed.notify_all()

    def _hand_over(self, result: BatchOutput) -> None:
        keep = self._results.append
        handle = self._handlers.get(result.request_id, keep)
        if result.is_finished():
            self._handlers.pop(result.request_id, None)
        handle(result)

    # -- its thread

    def is_running(self) -> bool:
        """Whether the manager's thread runs."""
        return self._is_serving

    def start(self) -> None:
        """Starts a thread that writes the texts."""
        if self.is_running():
            logger.warning("The manager runs already.")
            return
        self.background_thread_status = ThreadStatus()
        self._is_stopping = False
        self._is_hard_stop = False
        self._is_serving = True
        self._begin_epoch()
        is_inference = torch.is_inference_mode_enabled()
        self._thread = threading.Thread(target=self._serve, args=(is_inference,), daemon=True)
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stops the thread when all requests have ended, or after this step, failing them, with `hard_stop`.

        `block` waits for it, at most `timeout` seconds. `keep_for_next_session` has no effect: a manager can be started again.
        Raises ValueError where it would wait inside `pause` for requests without an end.
        """
        if block:
            self._check_can_wait(timeout)
        with self._changed:
            self._is_stopping = True
            self._is_hard_stop = hard_stop
            self._changed.notify_all()
        if block:
            self.join(timeout)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, at most `timeout` seconds. ValueError inside `pause`, where requests never end."""
        self._check_can_wait(timeout)
        if self._thread is not None:
            self._thread.join(timeout)

    def _check_can_wait(self, timeout: float | None) -> None:
        is_pausing = self._pausing_thread == threading.get_ident()
        if is_pausing and timeout is None and self._tickets and self.is_running():
            raise ValueError("Inside pause() no request can end, so waiting would never end: use stop(block=False).")

    def destroy(self) -> None:
        """Stops the thread."""
        if self.is_running():
            self.stop()

    def warmup(self) -> None:
        """Does nothing: there is nothing to be recorded."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No step runs inside, so that the models can be changed. No request is lost."""
        with self._changed:
            self._num_pauses += 1
        try:
            with self._step_lock:
                self._pausing_thread = threading.get_ident()
                try:
                    yield
                finally:
                    self._pausing_thread = None
                    self._begin_epoch()
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def run(self) -> Iterator[BatchOutput]:
        """Writes the texts of all requests in the caller's thread, without `start`. Yields results as they come.

        Raises ValueError inside `pause`, where no step runs.
        """
        with self._one_step():
            self._begin_epoch()
        while self._tickets or self._results:
            if self._tickets:
                with self._one_step():
                    self._advance()
            while self._results:
                yield self._results.popleft()

    def _begin_epoch(self) -> None:
        """Drops what is kept, and has no living row kept either: the models may have changed."""
        self._batch.epoch += 1
        self._conversations.drop_to(0)

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """Waits until no other thread runs a step or has paused. ValueError inside this thread's own `pause`."""
        if self._pausing_thread == threading.get_ident():
            raise ValueError("Inside pause() no step runs: call run() after it.")
        with self._step_lock:
            yield

    def _serve(self, is_inference: bool) -> None:
        error: Exception = RuntimeError("The manager was stopped before this request was complete.")
        try:
            with torch.inference_mode(is_inference):
                while self._is_needed():
                    with self._step_lock:
                        self._advance()
        except Exception as fault:  # of any type: no request may wait forever
            logger.error(f"The manager's thread has ended: {fault}")
            self.background_thread_status.fatal_error = error = fault
        finally:
            with self._changed:
                self._is_stopping = True
                for ticket in list(self._tickets.values()):
                    self._finish(ticket, error)
                self._batch.clear()
                self._conversations.drop_to(0)
                self._is_serving = False
                self._changed.notify_all()  # whoever waits for a result: none follows

    def _is_needed(self) -> bool:
        """Waits for something to do; whether there will be."""

        def has_work() -> bool:
            return self._is_stopping or bool(self._tickets and not self._num_pauses)

        with self._changed:
            self._changed.wait_for(has_work)
            if not self._is_stopping:
                return True
            return bool(self._tickets) and not self._is_hard_stop

    # -- the loop

    @torch.no_grad()
    def _advance(self) -> None:
        """Reads prompts where rows are free, then runs a step of all rows. What has begun ends with any error."""
        try:
            self._drop_cancelled()
            self._read_prompts()
            self._run_step()
        except BaseException as error:  # KeyboardInterrupt, too: no text may go on from half a step
            with self._changed:
                for ticket in list(self._tickets.values()):
                    if ticket not in self._waiting:
                        self._finish(ticket, error)
                self._batch.clear()
            raise

    def _run_step(self) -> None:
        """Runs a step of all rows."""
        batch = self._batch
        if not batch.sequences:
            return
        lengths = batch.conversation.target_cache.lengths
        try:
            # Processors with a state have seen a step that the target has run.
            step = self._with_memory(
                batch.run_step, may_retry=lambda: batch.conversation.target_cache.lengths == lengths
            )
            blocks = batch.commit(step)
        except Exception as error:  # of any type: the rows end, and further requests begin anew
            for number in list(batch.members):
                self._finish(self._rows[number], error)
            batch.clear()
            return
        live = {sequence.index for sequence in batch.sequences}
        for block in blocks:
            self._write(self._rows[block.sequence], block, is_done=block.sequence not in live)

    def _with_memory(self, function: Callable[[], Any], may_retry: Callable[[], bool] = lambda: True) -> Any:
        """What a function returns. Where memory lacks, kept conversations give way and it is called once more."""
        try:
            return function()
        except Exception as error:  # of any type: a model raises it
            if not is_out_of_memory(error) or not len(self._conversations) or not may_retry():
                raise
        # Outside of the handler, whose traceback holds what the function had allocated.
        self._conversations.drop_to(0)
        return function()

    def _drop_cancelled(self) -> None:
        with self._changed:
            tickets = [ticket for ticket in self._tickets.values() if ticket.is_cancelled]
        for ticket in tickets:
            error = Cancelled("The request was cancelled.")
            if ticket.number in self._batch.members:
                self._batch.members[ticket.number].error = error  # its row leaves with the next step
            else:
                self._finish(ticket, error)

    def _read_prompts(self) -> None:
        """Reads prompts, about as many tokens as a chunk has, while rows are free."""
        num_left = self._chunk_size
        while num_left > 0:
            if not self._reading:
                self._reading = self._next()
                if not self._reading:
                    return
                self._reader = self._new_reader()
            group = list(self._reading)
            num_left -= sum(min(len(ticket.output.prompt_ids), self._chunk_size) for ticket in group)
            try:
                logits = self._with_memory(self._read_chunk)
            except Exception as error:  # of any type: a lack of memory
                for ticket in group:
                    self._finish(ticket, error)
                continue
            if logits is not None:
                self._reading = []
                self._reader = None  # it holds the caches that the rows are copied from
                for place, ticket in enumerate(group):
                    self._admit(ticket, logits[place : place + 1])

    def _new_reader(self) -> Iterator[torch.Tensor | None]:
        return read_prompts([ticket.member for ticket in self._reading])

    def _read_chunk(self) -> torch.Tensor | None:
        """Reads the next chunk of the prompts. If it fails, they are read anew by the next call."""
        try:
            logits: torch.Tensor | None = next(self._reader)
        except Exception:  # of any type: a lack of memory
            self._reader = None
            for ticket in self._reading:
                ticket.member.conversation = Conversation()
            self._reader = self._new_reader()
            raise
        return logits

    def _admit(self, ticket: Ticket, logits: torch.Tensor) -> None:
        """Begins a text by logits [1, 1, V] after its prompt."""
        member = ticket.member
        try:
            block = member.accept_first(logits)
            if member.sequences:
                self._with_memory(lambda: self._batch.admit(ticket.number, member))
                self._rows[ticket.number] = ticket
        except Exception as error:  # of any type: processors and criteria raise it, too
            self._finish(ticket, error)
            return
        self._write(ticket, block, is_done=not member.sequences)

    def _next(self) -> list[Ticket]:
        """The requests whose prompts are read next: several that are short, or one; empty if none waits or has room."""
        group: list[Ticket] = []
        longest = 0
        while self._waiting:
            if len(self._batch.members) + len(group) >= self._most_rows:
                break
            ticket = self._waiting[0]
            try:
                if ticket.member is None:
                    ticket.member = self._prepared(ticket)
            except Exception as error:  # of any type: `generate` raises it
                self._finish(ticket, error)
                continue
            prompt_ids = ticket.output.prompt_ids
            longest = max(longest, len(prompt_ids))
            if not self._has_room([*group, ticket]):
                self._wait_longer(ticket)
                break
            kept = self._conversations.find(prompt_ids)  # of those that have not given way just now
            is_alone = kept is not None or (len(group) + 1) * longest > self._chunk_size
            if group and is_alone:
                self._wait_longer(ticket)
                break
            self._leave_queue(ticket)
            ticket.output.status = RequestStatus.PREFILLING
            group.append(ticket)
            ticket.member.epoch = self._batch.epoch
            if kept is not None:
                ticket.member.conversation = self._conversations.take(kept)
            if is_alone:
                break
        return group

    def _wait_longer(self, ticket: Ticket) -> None:
        """Leaves a request that has been prepared in the queue. One with a clock is prepared anew, so that its clock has not begun."""
        if self._has_clock:
            ticket.member = None

    def _prepared(self, ticket: Ticket) -> Member:
        keywords = dict(ticket.keywords)
        limit = max_positions(self.model)
        if self._is_endless and limit is not None:
            num_left = limit - len(ticket.output.prompt_ids)
            keywords.setdefault("max_new_tokens", max(num_left, 1))
        if self._seed is not None:
            keywords["generator"] = torch.Generator().manual_seed(self._seed + ticket.number)
        member: Member = self._decoder(ticket.output.prompt_ids, decoder_class=Member, **keywords)
        most = self._most_positions
        if most is not None and member.longest > most:
            fault = f"The text may need {member.longest} positions and the caches have {most}"
            raise ValueError(f"{fault}: ask for fewer new tokens, or raise num_blocks.")
        return member

    def _has_room(self, tickets: list[Ticket]) -> bool:
        """Whether there are positions for these beside the rows of the batch. Kept conversations give way."""
        if self._most_positions is None:
            return True
        rows = [*self._batch.members.values(), *[ticket.member for ticket in tickets]]
        longest = max(row.longest for row in rows)
        num_left = self._most_positions - len(rows) * longest
        while self._conversations.num_positions > max(num_left, 0):
            self._conversations.drop_to(len(self._conversations) - 1)
        return num_left >= 0

    def _write(self, ticket: Ticket, block: Block, is_done: bool) -> None:
        """Adds a block to the output of its request, and gives it where it is asked for."""
        output = ticket.output
        try:
            self._add(block, output)
        except Exception as error:  # of any type: a lack of memory
            ticket.member.error = error  # its row leaves with the next step
        if is_done:
            self._finish(ticket, ticket.member.error)
        elif ticket.streaming:
            output.status = RequestStatus.DECODING
            self._deliver(ticket)

    def _add(self, block: Block, output: BatchOutput) -> None:
        """Adds a block to an output, or nothing if it fails."""
        logprobs: list[float] = []
        if block.scores is not None:
            token_ids = torch.tensor(block.token_ids, dtype=torch.long, device=block.scores.device)
            of_tokens = block.scores.log_softmax(-1).gather(1, token_ids[:, None])
            logprobs = of_tokens.flatten().tolist()
        output.generated_tokens += block.token_ids
        output.logprobs += logprobs
        if block.token_ids and not block.is_prefill:  # a row that has failed commits nothing
            output.acceptance_lengths.append(block.acceptance_length)

    def _finish(self, ticket: Ticket, error: BaseException | None) -> None:
        """Ends a request and gives its result."""
        output = ticket.output
        output.status = RequestStatus.FINISHED
        if error is not None:
            output.status = RequestStatus.FAILED
            output.error = str(error) or type(error).__name__
        if self._rows.pop(ticket.number, None) is not None:
            self._batch.leave(ticket.number)
        if ticket in self._reading:
            self._reading.remove(ticket)
            if not self._reading:
                self._reader = None
        self._leave_queue(ticket)
        self._deliver(ticket)

    def _leave_queue(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._changed.notify_all()
