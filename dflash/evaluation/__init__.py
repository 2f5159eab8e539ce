"""Measuring from outside: clocks around the loop, ways of decoding side by side, tasks and scores, results and what shows them."""

from .answers import Answer, chat_encoder, summarise_answers
from .bench import run_bench
from .canary import Load, run_canary
from .comparison import Difference, first_difference
from .evaluate import Plan, pair_backend, questions_of, run_plan
from .harness import GREEDY, Prompt, check_methods
from .page import save_drawing, save_plots, write_page, write_readme
from .remote import server_backend
from .results import place_of
from .server import Server
from .tables import any_table, caveat, table_of
from .tasks import TASKS, Question, load_questions
from .timing import TimedRun, timed_blocks, timed_generate


__all__ = [
    "GREEDY",
    "TASKS",
    "Answer",
    "Difference",
    "Load",
    "Plan",
    "Prompt",
    "Question",
    "Server",
    "TimedRun",
    "any_table",
    "caveat",
    "chat_encoder",
    "check_methods",
    "first_difference",
    "load_questions",
    "pair_backend",
    "place_of",
    "questions_of",
    "run_bench",
    "run_canary",
    "run_plan",
    "save_drawing",
    "save_plots",
    "server_backend",
    "summarise_answers",
    "table_of",
    "timed_blocks",
    "timed_generate",
    "write_page",
    "write_readme",
]
