"""Measures decoding from outside: timing, tasks, scores, result files, and the tables, figures and pages that show them."""

from typing import TYPE_CHECKING

from dflash.common.lazy import lazy_names


if TYPE_CHECKING:
    from .backends import Backend, pair_backend, server_backend
    from .bench import BenchPlan, run_bench
    from .canary import Load, run_canary
    from .doctor import DOCTORS_PROMPTS, Setup, run_doctor
    from .eval_run import EvalPlan, check_eval_output, questions_of, run_eval
    from .heads import HeadReport, check_head
    from .markdown_pages import MARK, fill_pages, names_of, with_table
    from .measurements import Measurement, Prompt, compare, measured, summarise
    from .memory import PeakMemory, allocated_memory
    from .methods import (
        EAGER,
        GREEDY,
        HAS_NATIVE,
        METHODS,
        NATIVE,
        OURS,
        PLAIN,
        PROMPT_LOOKUP,
        RANDOM_DRAFTER,
        VARIANTS,
        check_methods,
        decoding_methods,
        untrained,
    )
    from .page import drawings, save_drawing, save_plots, write_page
    from .profiling import READS, Profile, host_syncs, step_split
    from .results import place_of, read_result
    from .sandbox import Limits, run_program
    from .scoring import check_scorers, extract_code, is_right
    from .tables import caveat, markdown, means_of_tasks, table_of, tables_of
    from .task_answers import TaskAnswer, answer_questions, chat_encoder, numbered, summarise_answers
    from .tasks import TASKS, Question, load_questions, questions_of_prompts
    from .text_difference import Difference, first_difference
    from .timed_server import Server
    from .timing import TimedRun, timed_blocks, timed_generate

__all__ = [
    "DOCTORS_PROMPTS", "EAGER", "GREEDY", "HAS_NATIVE", "MARK", "METHODS", "NATIVE", "OURS", "PLAIN",
    "PROMPT_LOOKUP", "RANDOM_DRAFTER", "READS", "TASKS", "VARIANTS", "Backend", "BenchPlan",
    "Difference", "EvalPlan", "HeadReport", "Limits", "Load", "Measurement", "PeakMemory", "Profile", "Prompt", "Question",
    "Server", "Setup", "TaskAnswer", "TimedRun", "allocated_memory", "answer_questions", "caveat",
    "chat_encoder", "check_eval_output", "check_head", "check_methods", "check_scorers", "compare", "decoding_methods",
    "drawings", "extract_code", "fill_pages", "first_difference", "host_syncs", "is_right", "load_questions",
    "markdown", "means_of_tasks", "measured", "names_of", "numbered", "pair_backend",
    "place_of", "questions_of", "questions_of_prompts", "read_result", "run_bench", "run_canary", "run_doctor", "run_eval",
    "run_program", "save_drawing", "save_plots",
    "server_backend", "step_split", "summarise", "summarise_answers", "table_of",
    "tables_of", "timed_blocks", "timed_generate", "untrained", "with_table", "write_page",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__, __file__)
