"""Seeded grade-school word problems with worked answers in GSM8K's form. It knows no tokenizer and no model.

A problem is a chain: a start (how many there are), up to three changes, and a question. Its *template* is the question's
wording with names, things and numbers blanked. The split is by template: a stable hash holds about a tenth of them out,
and every template of the frames in `FRAMES_HELD_OUT` is held out too, so no held-out wording is ever trained on.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from frames import FRAMES, FRAMES_HELD_OUT, MODIFIERS, NOUNS_OF_FRAME, Frame


SPLITS = ("train", "heldout")
HELD_OUT_PERCENT = 10
MAX_STEPS = 4
LARGEST = 250
FRAME_PARTS = ("open", "gain", "lose")
FRAME_SLOTS = ("{do}", "{did}", "{doing}", "{box}", "{group}")
DRILL_SEEDS = 500_000
MARK = re.compile(r"<<(.*?)>>")
RESULT_SLOT = re.compile(r"(\$?)\{\d(R?)\}")

WOMEN = """
Anna Maria Julia Emma Olivia Sophia Grace Lily Chloe Zoe Nina Clara Ruth Alice Betty Carol Diana
Elena Fiona Gina Hannah Irene Jane Karen Laura Mary Nora Paula Rosa Sarah Tina Vera Wendy Amy Beth
Cindy Donna Ella Jenny Kate Leah Mia Natalie Rachel Sally Tara Amanda Bella Daisy Eva
""".split()  # noqa: SIM905 - a name per line is a page of names
MEN = """
James John Robert Michael David Thomas Daniel Paul Mark George Kevin Brian Jason Ryan Jacob Eric
Adam Henry Peter Carl Sam Tom Tim Ben Jack Luke Max Leo Oscar Victor Walter Alex Andy Bob Charlie
Dan Ethan Frank Greg Harry Ian Joe Kyle Liam Mike Nathan Omar Phil Ray Steve
""".split()  # noqa: SIM905 - a name per line is a page of names


@dataclass(frozen=True)
class Problem:
    """One row: GSM8K's `question` and `answer`, and where they came from."""

    question: str
    answer: str
    final: int
    template: str
    frame: str
    steps: int
    held_out: bool


@dataclass(frozen=True)
class Step:
    """One line of arithmetic and its result."""

    expression: str
    result: int


@dataclass(frozen=True)
class Move:
    """What one sentence adds to the story: its numbers, its arithmetic and what is counted afterwards."""

    numbers: dict[str, int]
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Part:
    """A sentence in several wordings, and the answer's lines for its steps.

    `needs` is the kind of quantity it continues, `gives` the kind it leaves behind: "items" owned by one person,
    "pair" for the sum over two people, "money", "goal" for an amount still to be explained by the question.
    """

    key: str
    needs: str
    gives: str
    wordings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    move: Callable[[random.Random, int], Move | None]


def plus(a: int, b: int) -> Step:
    return Step(f"{a}+{b}", a + b)


def minus(a: int, b: int) -> Step:
    return Step(f"{a}-{b}", a - b)


def times(a: int, b: int) -> Step:
    return Step(f"{a}*{b}", a * b)


def over(a: int, b: int) -> Step:
    return Step(f"{a}/{b}", a // b)


def start(rng: random.Random, value: int) -> Move:
    number = rng.choice((rng.randint(4, 30), rng.randint(10, 99), 10 * rng.randint(2, 10), 12 * rng.randint(1, 8)))
    return Move({"x": number}, (Step("", number),))


def start_product(rng: random.Random, value: int) -> Move:
    count, size = rng.randint(2, 9), rng.choice((rng.randint(2, 9), rng.randint(2, 12), 10, 20))
    return Move({"x": count, "y": size}, (times(count, size),))


def start_sum(rng: random.Random, value: int) -> Move:
    first, second = rng.randint(3, 60), rng.randint(3, 60)
    return Move({"x": first, "y": second}, (plus(first, second),))


def start_two_products(rng: random.Random, value: int) -> Move:
    first = times(rng.randint(2, 9), rng.randint(2, 10))
    second = times(rng.randint(2, 9), rng.randint(2, 10))
    (x, y), (z, w) = (map(int, step.expression.split("*")) for step in (first, second))
    return Move({"x": x, "y": y, "z": z, "w": w}, (first, second, plus(first.result, second.result)))


def start_more(rng: random.Random, value: int) -> Move:
    first, more = rng.randint(3, 50), rng.randint(2, 40)
    second = plus(first, more)
    return Move({"x": first, "y": more}, (second, plus(first, second.result)))


def start_fewer(rng: random.Random, value: int) -> Move:
    first = rng.randint(8, 90)
    fewer = rng.randint(2, first - 3)
    second = minus(first, fewer)
    return Move({"x": first, "y": fewer}, (second, plus(first, second.result)))


def start_times(rng: random.Random, value: int) -> Move:
    first, factor = rng.randint(3, 20), rng.randint(3, 5)
    second = times(first, factor)
    return Move({"x": first, "k": factor}, (second, plus(first, second.result)))


def start_twice(rng: random.Random, value: int) -> Move:
    first = rng.randint(3, 60)
    second = times(first, 2)
    return Move({"x": first}, (second, plus(first, second.result)))


def start_half(rng: random.Random, value: int) -> Move:
    first = 2 * rng.randint(2, 50)
    second = over(first, 2)
    return Move({"x": first}, (second, plus(first, second.result)))


def gain(rng: random.Random, value: int) -> Move:
    number = rng.choice((rng.randint(2, 20), rng.randint(2, 50)))
    return Move({"x": number}, (plus(value, number),))


def lose(rng: random.Random, value: int) -> Move | None:
    if value < 5:
        return None
    number = rng.randint(2, min(value - 2, 60))
    return Move({"x": number}, (minus(value, number),))


def lose_product(rng: random.Random, value: int) -> Move | None:
    count, size = rng.randint(2, 9), rng.randint(2, 9)
    taken = times(count, size)
    if value - taken.result < 2:
        return None
    return Move({"x": count, "y": size}, (taken, minus(value, taken.result)))


def gain_product(rng: random.Random, value: int) -> Move:
    count, size = rng.randint(2, 9), rng.randint(2, 10)
    added = times(count, size)
    return Move({"x": count, "y": size}, (added, plus(value, added.result)))


def double(rng: random.Random, value: int) -> Move | None:
    return Move({}, (times(value, 2),)) if value <= 60 else None


def multiply(rng: random.Random, value: int) -> Move | None:
    factor = rng.randint(3, 5)
    return Move({"k": factor}, (times(value, factor),)) if value <= 20 else None


def halve(rng: random.Random, value: int) -> Move | None:
    return Move({}, (over(value, 2),)) if value % 2 == 0 and value >= 4 else None


def lose_third(rng: random.Random, value: int) -> Move | None:
    return Move({}, (over(value, 3), minus(value, value // 3))) if value % 3 == 0 and value >= 6 else None


def lose_quarter(rng: random.Random, value: int) -> Move | None:
    return Move({}, (over(value, 4), minus(value, value // 4))) if value % 4 == 0 and value >= 8 else None


def lose_percent(rng: random.Random, value: int) -> Move | None:
    percent = rng.choice((10, 20, 25, 50))
    if value * percent % 100 or value < 10:
        return None
    taken = value * percent // 100
    return Move({"p": percent}, (Step(f"{value}*{percent}/100", taken), minus(value, taken)))


def share(rng: random.Random, value: int) -> Move | None:
    divisors = [k for k in range(2, 11) if value % k == 0 and value // k >= 2]
    if not divisors:
        return None
    divisor = rng.choice(divisors)
    return Move({"k": divisor}, (over(value, divisor),))


def price(rng: random.Random, value: int) -> Move | None:
    cost = rng.randint(2, 5 if value > 20 else 10)
    return Move({"x": cost}, (times(value, cost),)) if value <= 60 else None


def reach(rng: random.Random, value: int) -> Move:
    goal = value + rng.choice((rng.randint(2, 40), 10 - value % 10 + 10 * rng.randint(0, 5)))
    return Move({"x": goal}, (minus(goal, value),))


def ask(rng: random.Random, value: int) -> Move:
    return Move({})


STARTS: tuple[Part, ...] = (
    Part(
        "packs",
        "",
        "items",
        (
            "{name} has {x} {box}s with {y} {items} in each {box}.",
            "{name} fills {x} {box}s with {y} {items} each.",
            "There are {y} {items} in every {box}, and {name} has {x} {box}s.",
        ),
        (("{name} has {0} {items} in the {box}s.",), ("In {x} {box}s there are {0} {items}.",)),
        start_product,
    ),
    Part(
        "rate",
        "",
        "items",
        (
            "{name} {did} {y} {items} every day for {x} days.",
            "Each day {name} {did} {y} {items}. This went on for {x} days.",
            "It takes {name} one hour to {do} {y} {items}. {He} works for {x} hours.",
            "{name} can {do} {y} {items} per hour and keeps {doing} for {x} hours.",
        ),
        (("In that time {name} {did} {0} {items}.",), ("{He} {did} {0} {items}.",)),
        start_product,
    ),
    Part(
        "kinds",
        "",
        "items",
        (
            "{name} {did} {x} {items} at noon and {y} {items} at night.",
            "{name} has {x} {items} at home and {y} {items} at work.",
            "{name} {did} {x} {items} on Monday and {y} {items} on Tuesday.",
            "On Saturday {name} {did} {x} {items}, and on Sunday {he} {did} {y} more.",
        ),
        (("{name} has {0} {items} in total.",), ("Altogether there are {0} {items}.",)),
        start_sum,
    ),
    Part(
        "two-packs",
        "",
        "items",
        (
            "{name} has {x} small {box}s with {y} {items} each and {z} big {box}s with {w} {items} each.",
            "{name} {did} {y} {items} a day for {x} days and then {w} {items} a day for {z} days.",
        ),
        (("The first part is {0} {items}.", "The second part is {1} {items}.", "Together that is {2} {items}."),),
        start_two_products,
    ),
    Part(
        "more",
        "",
        "pair",
        (
            "{name} {did} {x} {items}. {other} {did} {y} more {items} than {name}.",
            "{name} has {x} {items}, and {other} has {y} more than {him}.",
            "{other} {did} {y} more {items} than {name}, who {did} {x}.",
        ),
        (("{other} has {0} {items}.", "Together they have {1} {items}."),),
        start_more,
    ),
    Part(
        "fewer",
        "",
        "pair",
        (
            "{name} {did} {x} {items}. {other} {did} {y} fewer {items} than {name}.",
            "{name} has {x} {items}, and {other} has {y} fewer than {him}.",
            "{other} {did} {y} fewer {items} than {name}, who {did} {x}.",
        ),
        (("{other} has {0} {items}.", "Together they have {1} {items}."),),
        start_fewer,
    ),
    Part(
        "times",
        "",
        "pair",
        (
            "{name} {did} {x} {items}. {other} {did} {k} times as many {items} as {name}.",
            "{name} has {x} {items}, while {other} has {k} times that many.",
        ),
        (("{other} has {0} {items}.", "Together they have {1} {items}."),),
        start_times,
    ),
    Part(
        "twice",
        "",
        "pair",
        (
            "{name} {did} {x} {items}. {other} {did} twice as many {items} as {name}.",
            "{name} has {x} {items}, and {other} has double that number.",
        ),
        (("{other} has {0} {items}.", "Together they have {1} {items}."),),
        start_twice,
    ),
    Part(
        "half",
        "",
        "pair",
        (
            "{name} {did} {x} {items}. {other} {did} half as many {items} as {name}.",
            "{name} has {x} {items}, and {other} has only half as many.",
        ),
        (("{other} has {0} {items}.", "Together they have {1} {items}."),),
        start_half,
    ),
    Part(
        "cost",
        "",
        "money",
        (
            "{name} buys {x} {items} that cost ${y} each.",
            "{name} pays ${y} for each of {x} {items}.",
            "The price of one of the {items} is ${y}, and {name} gets {x} of them.",
        ),
        (("The {items} cost ${0}.",),),
        start_product,
    ),
    Part(
        "two-costs",
        "",
        "money",
        (
            "{name} buys {x} {items} for ${y} each and {z} {others} for ${w} each.",
            "At the store, {name} gets {x} {items} at ${y} apiece and {z} {others} at ${w} apiece.",
        ),
        (("The {items} cost ${0}.", "The {others} cost ${1}.", "In total that is ${2}."),),
        start_two_products,
    ),
    Part(
        "earn",
        "",
        "purse",
        (
            "{name} sells {x} {items} for ${y} each.",
            "{name} gets ${y} for every one of {his} {items} and sells {x} of them.",
            "{name} earns ${y} an hour and works {x} hours to pay for {items}.",
        ),
        (("{name} earns ${0}.",),),
        start_product,
    ),
    Part(
        "save",
        "",
        "purse",
        (
            "{name} saves ${y} every week for {x} weeks to buy {items}.",
            "To pay for {items}, {name} puts ${y} a month into a jar. {He} does this for {x} months.",
        ),
        (("{name} saves ${0}.",),),
        start_product,
    ),
)

CHANGES: tuple[Part, ...] = (
    Part(
        "gain-product",
        "items",
        "items",
        (
            "Then {he} gets {x} more {box}s with {y} {items} each.",
            "A friend gives {him} {x} {box}s of {y} {items}.",
            "In each of the next {x} hours {he} adds {y} {items}.",
        ),
        (("{He} gets {0} new {items}.", "Now there are {1} {items}."),),
        gain_product,
    ),
    Part(
        "lose-product",
        "items",
        "items",
        (
            "{He} gives {y} {items} to each of {x} {group}.",
            "Then {x} {group} take {y} {items} each.",
            "Over the next {x} days {he} uses {y} {items} a day.",
        ),
        (("That takes away {0} {items}.", "{He} has {1} {items} left."),),
        lose_product,
    ),
    Part(
        "double",
        "items",
        "items",
        (
            "By the next week the number of {items} doubles.",
            "A month later {he} has twice as many {items}.",
        ),
        (("Then there are {0} {items}.",),),
        double,
    ),
    Part(
        "multiply",
        "items",
        "items",
        (
            "By the end of the year there are {k} times as many {items}.",
            "Soon {he} has {k} times that many {items}.",
        ),
        (("Then there are {0} {items}.",),),
        multiply,
    ),
    Part(
        "halve",
        "items",
        "items",
        (
            "{He} gives away half of the {items}.",
            "Half of the {items} go to {other}.",
            "{other} takes half of the {items}.",
        ),
        (("Half of the {items} is {0}, so {0R} {items} are left.",),),
        halve,
    ),
    Part(
        "third",
        "items",
        "items",
        (
            "{He} gives a third of the {items} to {other}.",
            "One third of the {items} are gone by Friday.",
        ),
        (("A third of the {items} is {0}.", "{He} has {1} {items} left."),),
        lose_third,
    ),
    Part(
        "quarter",
        "items",
        "items",
        (
            "{He} gives a quarter of the {items} to {other}.",
            "One fourth of the {items} are gone by Friday.",
        ),
        (("A quarter of the {items} is {0}.", "{He} has {1} {items} left."),),
        lose_quarter,
    ),
    Part(
        "percent",
        "items",
        "items",
        (
            "{He} gives {p}% of the {items} to {other}.",
            "Then {p}% of the {items} are lost.",
            "On Friday {he} gets rid of {p}% of the {items}.",
        ),
        (("{p}% of the {items} is {0}.", "{He} has {1} {items} left."),),
        lose_percent,
    ),
    Part(
        "third-person",
        "pair",
        "pair",
        (
            "{third} {did} {x} {items}.",
            "Their friend {third} has {x} {items}.",
        ),
        (("With {third} they have {0} {items}.",),),
        gain,
    ),
    Part(
        "pair-lose",
        "pair",
        "pair",
        (
            "They put the {items} together and give {x} of them away.",
            "Then they lose {x} of the {items} on the way home.",
        ),
        (("They have {0} {items} left.",),),
        lose,
    ),
    Part(
        "fee",
        "money",
        "money",
        (
            "Delivery costs another ${x}.",
            "{He} also buys a bag for ${x}.",
            "{He} pays ${x} more in tax.",
        ),
        (("With that {he} pays ${0}.",),),
        gain,
    ),
    Part(
        "coupon",
        "money",
        "money",
        (
            "{He} has a coupon for ${x} off.",
            "The clerk takes ${x} off the price.",
        ),
        (("After the discount it costs ${0}.",),),
        lose,
    ),
    Part(
        "discount",
        "money",
        "money",
        (
            "Everything is {p}% off.",
            "The store takes {p}% off the total.",
        ),
        (("The discount is ${0}.", "So {he} pays ${1}."),),
        lose_percent,
    ),
    Part(
        "gift",
        "purse",
        "purse",
        (
            "{His} parents give {him} ${x} more.",
            "{He} already had ${x} at home.",
            "{He} finds another ${x} in a coat.",
        ),
        (("Now {he} has ${0}.",),),
        gain,
    ),
    Part(
        "spend",
        "purse",
        "purse",
        (
            "{He} spends ${x} on lunch.",
            "{He} has to pay ${x} for supplies.",
            "Then {he} buys a book for ${x}.",
        ),
        (("{He} has ${0} left.",),),
        lose,
    ),
    Part(
        "spend-half",
        "purse",
        "purse",
        (
            "{He} gives half of the money to {other}.",
            "{He} puts half of the money in the bank and keeps the rest.",
        ),
        (("Half of the money is ${0}, so {he} keeps ${0R}.",),),
        halve,
    ),
)

QUESTIONS: tuple[Part, ...] = (
    Part(
        "now",
        "items",
        "",
        (
            "How many {items} are there now?",
            "How many {items} does {name} have in the end?",
            "How many {items} is that in all?",
            "What is the number of {items} now?",
        ),
        ((),),
        ask,
    ),
    Part(
        "share",
        "items",
        "",
        (
            "If the {items} are shared equally among {k} {group}, how many {items} does each get?",
            "{He} divides the {items} equally between {k} {group}. How many {items} are there for each?",
            "{He} puts the {items} into {k} equal {box}s. How many {items} are in each {box}?",
        ),
        (("Each one gets {0} {items}.",), ("Each has {0} {items}.",)),
        share,
    ),
    Part(
        "boxes",
        "items",
        "",
        (
            "If {k} {items} fit in one {box}, how many {box}s are needed?",
            "{He} packs them into {box}s of {k}. How many {box}s does {he} fill?",
            "{He} uses {k} {items} a day. How many days will they last?",
        ),
        (("The answer is {0}.",), ("{He} needs {0} of them.",)),
        share,
    ),
    Part(
        "sell",
        "items",
        "",
        (
            "If each one is worth ${x}, how much money is that in total?",
            "{He} sells all of them for ${x} each. How much money does {he} make?",
            "How many dollars does {he} get if every one of the {items} sells for ${x}?",
        ),
        (("The {items} bring in ${0}.",),),
        price,
    ),
    Part(
        "goal",
        "items",
        "",
        (
            "How many more {items} does {he} need to have {x}?",
            "{His} goal is {x} {items}. How many {items} are missing?",
            "If {he} wants {x} {items}, how many more must {he} get?",
        ),
        (("{He} needs {0} more {items}.",),),
        reach,
    ),
    Part(
        "together",
        "pair",
        "",
        (
            "How many {items} do they have together?",
            "How many {items} is that altogether?",
            "What is the total number of {items}?",
        ),
        ((),),
        ask,
    ),
    Part(
        "together-share",
        "pair",
        "",
        (
            "If they share all the {items} equally among {k} {group}, how many {items} does each get?",
            "They put all of the {items} into {k} {box}s. How many {items} go into each {box}?",
        ),
        (("Each one gets {0} {items}.",),),
        share,
    ),
    Part(
        "together-sell",
        "pair",
        "",
        (
            "They sell all the {items} for ${x} each. How much money do they make?",
            "If every one of the {items} is worth ${x}, how much money is that in total?",
        ),
        (("The {items} bring in ${0}.",),),
        price,
    ),
    Part(
        "together-goal",
        "pair",
        "",
        (
            "They want {x} {items}. How many more do they need?",
            "How many {items} are they short of {x}?",
        ),
        (("They need {0} more {items}.",),),
        reach,
    ),
    Part(
        "pay",
        "money",
        "",
        (
            "How much does {name} pay in total?",
            "How much money does {he} spend?",
            "What is the total cost in dollars?",
        ),
        ((),),
        ask,
    ),
    Part(
        "change",
        "money",
        "",
        (
            "{He} pays with ${x}. How much change does {he} get?",
            "If {he} had ${x}, how much money is left?",
            "How much of {his} ${x} does {he} have left?",
        ),
        (("{He} has ${0} left.",),),
        reach,
    ),
    Part(
        "split-cost",
        "money",
        "",
        (
            "{He} splits the cost equally with friends, so {k} people pay. How much does each pay?",
            "If {k} {group} share the cost equally, how much does each pay?",
        ),
        (("Each pays ${0}.",),),
        share,
    ),
    Part(
        "purse",
        "purse",
        "",
        (
            "How much money does {name} have now?",
            "How many dollars does {he} have in the end?",
            "How much money is that?",
        ),
        ((),),
        ask,
    ),
    Part(
        "purse-goal",
        "purse",
        "",
        (
            "How much more does {he} need to buy a bike for ${x}?",
            "{He} wants a game that costs ${x}. How many more dollars does {he} need?",
        ),
        (("{He} needs ${0} more.",),),
        reach,
    ),
    Part(
        "purse-share",
        "purse",
        "",
        (
            "{He} shares the money equally among {k} {group}. How much does each get?",
            "If {he} spends the money over {k} days, the same each day, how much is that a day?",
        ),
        (("Each part is ${0}.",),),
        share,
    ),
)


def show(step: Step, dollar: str, bare: str) -> str:
    """The step as GSM8K writes it, `12+5 = <<12+5=17>>17`, or its result alone."""
    if bare:
        return f"{dollar}{step.result}"
    return f"{step.expression} = {dollar}<<{step.expression}={step.result}>>{step.result}"


@dataclass
class Draft:
    """A story being told: both its text and its skeleton, so that the two cannot drift apart."""

    rng: random.Random
    words: dict[str, str]
    blanks: dict[str, str]
    value: int = 0
    told_by_frame: bool = False
    text: list[str] = field(default_factory=list)
    skeleton: list[str] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)

    def tell(self, part: Part) -> bool:
        """Adds one part; False where its arithmetic does not fit the present value."""
        move = part.move(self.rng, self.value)
        if move is None or any(step.result > LARGEST for step in move.steps):
            return False
        index = self.rng.randrange(len(part.wordings))
        self.told_by_frame |= part.key in FRAME_PARTS or any(slot in part.wordings[index] for slot in FRAME_SLOTS)
        numbers = {key: str(number) for key, number in move.numbers.items()}
        self.text.append(part.wordings[index].format(**self.words, **numbers))
        self.skeleton.append(part.wordings[index].format(**self.blanks, **dict.fromkeys(numbers, "[n]")))
        for line, step in zip(part.lines[index % len(part.lines)], move.steps, strict=False):
            worked = RESULT_SLOT.sub(lambda slot, step=step: show(step, *slot.groups()), line)
            self.answer.append(worked.format(**self.words, **numbers))
        if move.steps:
            self.value = move.steps[-1].result
        return True


def frame_parts(frame: Frame) -> tuple[Part, tuple[Part, ...]]:
    """The frame's own start and its own changes."""
    opening = Part("open", "", "items", frame.opens, ((),), start)
    gained = (("Now {name} has {0} {items}.",), ("That makes {0} {items}.",), ("In all there are {0} {items}.",))
    lost = (("{He} has {0} {items} left.",), ("That leaves {0} {items}.",), ("Then there are {0} {items} left.",))
    return opening, (
        Part("gain", "items", "items", frame.gains, gained, gain),
        Part("lose", "items", "items", frame.loses, lost, lose),
    )


def pick_items(rng: random.Random, frame: Frame) -> tuple[str, str]:
    """Two things to count: the frame's own, or others that suit it, half of the time with a word before."""
    nouns = NOUNS_OF_FRAME.get(frame.key, frame.items)
    items, others = rng.sample(nouns if rng.random() < 0.7 else frame.items, 2)
    if rng.random() < 0.4:
        items = f"{rng.choice(MODIFIERS)} {items}"
    return items, others


def cast(rng: random.Random, frame: Frame) -> tuple[dict[str, str], dict[str, str]]:
    """The words that fill the slots of one story, and the blanks that stand for them in its template."""
    woman = rng.random() < 0.5
    name = rng.choice(WOMEN if woman else MEN)
    other, third = rng.sample([n for n in WOMEN + MEN if n != name], 2)
    items, others = pick_items(rng, frame)
    he, him, his = ("she", "her", "her") if woman else ("he", "him", "his")
    blanked = {"name": name, "other": other, "third": third, "items": items, "others": others}
    blanked |= {"he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize()}
    fixed = {"do": frame.do, "did": frame.did, "doing": frame.doing, "box": frame.box, "group": frame.group}
    return blanked | fixed, {slot: f"[{slot}]" for slot in blanked} | fixed


def pick_parts(rng: random.Random, frame: Frame) -> list[Part]:
    """A start, up to three changes that continue it, and a question."""
    opening, own_changes = frame_parts(frame)
    parts = [opening if rng.random() < 0.35 else rng.choice(STARTS)]
    kind = parts[0].gives
    # A frame's own gains and losses are drawn as often as all the shared changes together.
    own = [part for part in own_changes if part.needs == kind]
    shared = [part for part in CHANGES if part.needs == kind]
    for _ in range(rng.choices((0, 1, 2, 3), (3, 5, 4, 1))[0]):
        parts.append(rng.choice(own if own and rng.random() < 0.5 else shared))
    parts.append(rng.choice([part for part in QUESTIONS if part.needs == kind]))
    return parts


def tell_problem(rng: random.Random, frame: Frame) -> Problem | None:
    """One problem, or None where the drawn numbers do not fit the drawn parts."""
    draft = Draft(rng, *cast(rng, frame))
    if not all(draft.tell(part) for part in pick_parts(rng, frame)):
        return None
    steps = len(draft.answer)
    if not 1 <= steps <= MAX_STEPS:
        return None
    template = " ".join(draft.skeleton)
    if frame.key in FRAMES_HELD_OUT and not draft.told_by_frame:
        # Shared wording without a word of the frame: another frame tells the very same template.
        return None
    return Problem(
        question=" ".join(draft.text),
        answer="\n".join([*(line[0].upper() + line[1:] for line in draft.answer), f"#### {draft.value}"]),
        final=draft.value,
        template=template,
        frame=frame.key,
        steps=steps,
        held_out=is_held_out(template, frame.key),
    )


def is_held_out(template: str, frame: str) -> bool:
    """True for the templates no training may see; depends on the wording alone, never on a seed."""
    if frame in FRAMES_HELD_OUT:
        return True
    digest = hashlib.sha256(template.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def stream(seed: int, split: str = "train") -> Iterator[Problem]:
    """Endless problems of one split; the same seed gives the same problems.

    Half of the "heldout" problems come from the held-out frames, half are held-out wordings of the other frames.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = random.Random(f"{split}-{seed}")
    known = [frame for frame in FRAMES if frame.key not in FRAMES_HELD_OUT]
    unknown = [frame for frame in FRAMES if frame.key in FRAMES_HELD_OUT]
    from_unknown = False
    while True:
        problem = tell_problem(rng, rng.choice(unknown if from_unknown else known))
        if problem is None or problem.held_out != (split == "heldout"):
            continue
        yield problem
        from_unknown = split == "heldout" and not from_unknown


def drills(seed: int) -> Iterator[tuple[str, str]]:
    """Endless questions and answers of bare arithmetic: the sums of the training problems, many to a row.

    A problem spends fifty tokens on a sum, a drill sixteen, and arithmetic is what a small model learns last.
    """
    rng = random.Random(f"drills-{seed}")
    sums = (mark for problem in stream(seed + DRILL_SEEDS) for mark in MARK.findall(problem.answer))
    while True:
        chosen = list(itertools.islice(sums, rng.randint(4, 12)))
        listed = ", ".join(mark.split("=")[0] for mark in chosen)
        lines = "\n".join(f"<<{mark}>>" for mark in chosen)
        yield f"Work out {listed}.", f"{lines}\n#### {chosen[-1].split('=')[1]}"


def generate(count: int, seed: int, split: str = "train") -> list[Problem]:
    """The first `count` problems of `stream(seed, split)`."""
    return list(itertools.islice(stream(seed, split), count))
