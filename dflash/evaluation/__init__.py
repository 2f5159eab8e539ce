"""Measuring from outside: clocks around the loop, and what two texts have in common."""

from .bench import run_bench, save_plots
from .canary import Load, run_canary
from .comparison import Difference, first_difference
from .evaluate import Answer
from .harness import Prompt
from .journal import write_aside
from .page import save_drawing, write_page, write_readme
from .processes import Processes
from .remote import server_backend
from .run import Plan, questions_of, run_backend, run_plan
from .server import Server
from .stopwatch import seconds_of
from .tables import method_table
from .tasks import TASKS, Question, load_questions
from .timing import TimedRun, timed_blocks, timed_generate


__all__ = [
    "TASKS",
    "Answer",
    "Difference",
    "Load",
    "Plan",
    "Processes",
    "Prompt",
    "Question",
    "Server",
    "TimedRun",
    "first_difference",
    "load_questions",
    "method_table",
    "questions_of",
    "run_backend",
    "run_bench",
    "run_canary",
    "run_plan",
    "save_drawing",
    "save_plots",
    "seconds_of",
    "server_backend",
    "timed_blocks",
    "timed_generate",
    "write_aside",
    "write_page",
    "write_readme",
]
