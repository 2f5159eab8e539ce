"""Measuring from outside: clocks around the loop, ways of decoding side by side, tasks and scores, results and what shows them."""

from .answers import Answer, chat_encoder, summarise_answers
from .bench import run_bench
from .canary import Load, run_canary
from .comparison import Difference, first_difference
from .evaluate import Plan, pair_backend, questions_of, run_plan
from .harness import EAGER, GREEDY, HAS_NATIVE, PLAIN, VARIANTS, Prompt, check_methods, compare, summarise
from .markdown_pages import MARK, fill_pages, names_of, with_table
from .memory import PeakMemory
from .page import drawings, save_drawing, save_plots, write_page
from .remote import server_backend
from .results import place_of, read_result
from .scripted import SHAPES, Script, scripted_continuation, scripted_pair, scripted_prompt, useless
from .server import Server
from .sweep import EAGERLY, measure_point, measure_prefill
from .tables import any_table, caveat, markdown, table_of, tables_of
from .tasks import TASKS, Question, load_questions
from .timing import TimedRun, timed_blocks, timed_generate


__all__ = [
    "EAGER",
    "EAGERLY",
    "GREEDY",
    "HAS_NATIVE",
    "MARK",
    "PLAIN",
    "SHAPES",
    "TASKS",
    "VARIANTS",
    "Answer",
    "Difference",
    "Load",
    "PeakMemory",
    "Plan",
    "Prompt",
    "Question",
    "Script",
    "Server",
    "TimedRun",
    "any_table",
    "caveat",
    "chat_encoder",
    "check_methods",
    "compare",
    "drawings",
    "fill_pages",
    "first_difference",
    "load_questions",
    "markdown",
    "measure_point",
    "measure_prefill",
    "names_of",
    "pair_backend",
    "place_of",
    "questions_of",
    "read_result",
    "run_bench",
    "run_canary",
    "run_plan",
    "save_drawing",
    "save_plots",
    "scripted_continuation",
    "scripted_pair",
    "scripted_prompt",
    "server_backend",
    "summarise",
    "summarise_answers",
    "table_of",
    "tables_of",
    "timed_blocks",
    "timed_generate",
    "useless",
    "with_table",
    "write_page",
]
